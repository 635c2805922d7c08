from aiohttp import web

from backend_client import InferenceClient, NPUUnavailableError, RequestRejected

CLIENT = web.AppKey("client", InferenceClient)


async def client(app: web.Application):
    async with InferenceClient.from_settings() as app[CLIENT]:
        yield


async def answer(request: web.Request) -> web.Response:
    try:
        result = await request.app[CLIENT].generate(await request.text(), timeout=2)
    except RequestRejected:
        raise web.HTTPBadRequest(text="the prompt cannot be answered") from None
    except NPUUnavailableError as error:
        seconds = max(1, round(error.retry_after or 1))
        raise web.HTTPServiceUnavailable(headers={"Retry-After": str(seconds)}) from None
    return web.json_response({"text": result.text, "source": result.source})


def make_app() -> web.Application:
    app = web.Application()
    app.cleanup_ctx.append(client)
    app.add_routes([web.post("/answer", answer)])
    return app
