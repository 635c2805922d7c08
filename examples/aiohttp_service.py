"""An aiohttp service with one client for its life; `web.run_app(app)` starts it."""

from aiohttp import web

from backend_client import InferenceClient

INFERENCE = web.AppKey("inference", InferenceClient)


async def inference(app: web.Application):
    async with InferenceClient.from_settings() as app[INFERENCE]:
        yield


async def embed(request: web.Request) -> web.Response:
    return web.json_response(await request.app[INFERENCE].embed(await request.text(), timeout=5))


app = web.Application()
app.cleanup_ctx.append(inference)
app.add_routes([web.post("/embed", embed)])
