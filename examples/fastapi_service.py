"""A FastAPI service that streams answers and passes errors on as clear statuses: uvicorn fastapi_service:app."""

import logging
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse

from backend_client import InferenceClient, NPUUnavailableError, RequestRejected
from backend_client.errors import AuthenticationFailed, ContextLengthExceeded, ModelNotFound, PayloadTooLarge

log = logging.getLogger(__name__)


@asynccontextmanager
async def lifespan(app: FastAPI):
    async with InferenceClient.from_settings() as app.state.inference:  # one client for the process
        yield


app = FastAPI(lifespan=lifespan)


def reply_to(error: Exception) -> HTTPException:
    """The reply to a failed call. Messages of this package name nodes and models: they are for the log only."""
    log.warning("inference failed: %s (request %s)", error, error.request_id)
    match error:
        case AuthenticationFailed() | ModelNotFound():  # our key or model, not the user's mistake
            return HTTPException(500, "internal error")
        case NPUUnavailableError():  # after ModelNotFound, which is one, too
            return HTTPException(503, "try again later", {"Retry-After": str(max(1, round(error.retry_after or 1)))})
        case ContextLengthExceeded() | PayloadTooLarge():
            return HTTPException(413, "the prompt is too long")
        case _:
            return HTTPException(400, "the prompt cannot be answered")


@app.post("/answer")
async def answer(prompt: str, request: Request):
    stream = request.app.state.inference.stream(prompt, timeout=60, temperature=0)
    try:
        first = await anext(stream, "")  # errors come before the status line
    except (NPUUnavailableError, RequestRejected) as error:
        raise reply_to(error) from error

    async def body():
        async with stream:  # a reader that leaves stops the node
            yield first
            async for piece in stream:
                yield piece

    return StreamingResponse(body(), media_type="text/plain")


@app.get("/healthz")
async def healthz(request: Request):
    return request.app.state.inference.healthz().as_dict()
