from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request

from backend_client import InferenceClient, NPUUnavailableError


@asynccontextmanager
async def lifespan(app: FastAPI):
    async with InferenceClient.from_settings() as app.state.inference:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/answer")
async def answer(request: Request, prompt: str):
    try:
        result = await request.app.state.inference.generate(prompt, timeout=2)
    except NPUUnavailableError:
        raise HTTPException(503, "try again later") from None
    return {"text": result.text, "source": result.source}
