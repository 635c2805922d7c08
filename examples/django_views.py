"""Views of Django with the blocking client, which suits threads and forked processes."""

from functools import cache

from django.http import HttpRequest, JsonResponse, StreamingHttpResponse
from django.urls import path
from django.views.decorators.http import require_GET

from backend_client import NPUUnavailableError, RequestRejected
from backend_client.sync import InferenceClient


@cache
def inference() -> InferenceClient:
    return InferenceClient.from_settings()  # one for the process, made by the first view


class InferenceErrors:  # in settings.MIDDLEWARE
    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request: HttpRequest):
        return self.get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> JsonResponse | None:
        match error:
            case NPUUnavailableError():
                seconds = max(1, round(error.retry_after or 1))
                return JsonResponse({"detail": "try again later"}, status=503, headers={"Retry-After": str(seconds)})
            case RequestRejected():
                return JsonResponse({"detail": "the request cannot be served"}, status=400)


@require_GET
def vector(request: HttpRequest) -> JsonResponse:
    result = inference().embed_result(request.GET["text"], timeout=5)
    return JsonResponse({"vector": result.vector, "space": result.space})


@require_GET
def answer(request: HttpRequest) -> StreamingHttpResponse:
    stream = inference().stream(request.GET["prompt"], timeout=60, temperature=0)
    first = next(stream, "")  # errors come before the status line

    def pieces():
        with stream:  # a reader that leaves stops the node
            yield first
            yield from stream

    return StreamingHttpResponse(pieces(), content_type="text/plain")


urlpatterns = [path("vector", vector), path("answer", answer)]
