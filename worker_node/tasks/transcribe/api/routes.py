"""POST /v1/audio/transcriptions and /v1/audio/translations, as OpenAI's API has them."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from pydantic import Field

from worker_node.api.context import request_context, route_headers
from worker_node.api.keys import NODE, STATE, DryRun
from worker_node.api.middleware import inference
from worker_node.api.openai.errors import describe_error
from worker_node.api.operation import ApiOperation
from worker_node.api.replies import Reply
from worker_node.api.sse import EventStream
from worker_node.api.task import TaskApi
from worker_node.core.errors import BadRequest, InsufficientStorage, NodeError, PayloadTooLarge
from worker_node.tasks.transcribe.api.form import UploadForm, read_form
from worker_node.tasks.transcribe.messages import Span
from worker_node.tasks.transcribe.options import AudioOptions
from worker_node.tasks.transcribe.serving import rendering
from worker_node.tasks.transcribe.serving.building import TranscriptionModel
from worker_node.tasks.transcribe.serving.decoder import audio_decoder
from worker_node.tasks.transcribe.serving.metrics import declare_speech_metrics
from worker_node.tasks.transcribe.serving.service import (
    SpokenPart,
    Transcription,
    TranscriptionRequest,
    explain,
    find_model,
    transcribe,
)
from worker_node.tasks.transcribe.serving.voice import find_voice

_MEBIBYTE = 1 << 20
_DURATION = Field(description="Seconds of audio")


class Text(Reply):
    """Reply with response_format json."""

    text: str
    usage: dict[str, Any]


class Segment(Reply):
    """A segment of a verbose reply. What a Whisper pipeline does not report is null."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float | None
    compression_ratio: float
    no_speech_prob: float | None


class Word(Reply):
    """A word of a verbose reply."""

    word: str
    start: float
    end: float


class VerboseText(Reply):
    """Reply with response_format verbose_json."""

    task: str
    language: str | None
    duration: float = _DURATION
    text: str
    segments: list[Segment] | None = None
    words: list[Word] | None = None
    usage: dict[str, Any]


async def _transcriptions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, translate=False)


async def _translations(request: web.Request) -> web.StreamResponse:
    return await _answer(request, translate=True)


async def _answer(request: web.Request, *, translate: bool) -> web.StreamResponse:
    node, context = request.app[NODE], request_context(request)
    if (dry_run := request[STATE].dry_run) is not None:
        form = described_form(dry_run)
        wanted = form.wanted(translate=translate)
        form.stream()  # raises what the request would
        form.note_ignored(request, detects_voice=True)
        await explain(node.services, context, wanted)
    # A file that is too large for every model here is not read; the model's own bound is checked where it is known.
    bounds = [model.limits for model in node.manager.models if isinstance(model, TranscriptionModel)]
    most = max((bound.max_audio_mb for bound in bounds), default=AudioOptions().max_audio_mb) * _MEBIBYTE
    with scratch_directory() as scratch:
        form = await read_form(request, scratch / "upload", most)
        wanted, reply_form, stream = form.wanted(translate=translate), form.form(), form.stream()
        model = await find_model(node.services, wanted, context)
        voice = await find_voice(node.manager, model.limits, wanted.voice, context.deadline)
        form.note_ignored(request, detects_voice=voice is not None or not wanted.voice.wanted)
        if form.size is not None and form.size > model.limits.max_audio_mb * _MEBIBYTE:
            raise PayloadTooLarge(f"file: more than {model.limits.max_audio_mb} MiB, the limit of {model.id}")
        decoder = node.services.parts.of(audio_decoder)
        async with transcribe(node.services, decoder, context, wanted, voice, scratch / "upload", scratch) as run:
            if stream and reply_form in {"json", "text"}:
                return await _stream(request, run)
            parts = [part async for part in run.parts]
            headers = route_headers(run.route, run.busy_us, shared=run.busy_shared)
            return _rendered(reply_form, run, parts, wanted, headers)


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory for one request's files. Raises InsufficientStorage where none can be made."""
    try:
        room = tempfile.TemporaryDirectory(prefix="npu-node-audio-", ignore_cleanup_errors=True)
    except OSError as error:
        raise InsufficientStorage(
            f"no temporary directory for the upload can be made ({error.strerror}); free space, or set TMPDIR"
        ) from None
    with room as path:
        yield Path(path)


def described_form(dry_run: DryRun) -> UploadForm:
    """The form of a request that is only to be explained, given as JSON without its file."""
    form = UploadForm(Path())
    fields = orjson.loads(dry_run.body)
    if not isinstance(fields, dict):
        raise BadRequest("body is an object with the fields of the form, without its file", param="body")
    for name, value in fields.items():
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                form.fields.add(name, str(item).lower() if isinstance(item, bool) else str(item))
    return form


def _rendered(
    form: str, run: Transcription, parts: list[SpokenPart], wanted: TranscriptionRequest, headers: dict[str, str]
) -> web.Response:
    text = rendering.whole(part.text for part in parts)
    segments = [segment for part in parts for segment in part.segments]
    if form == "srt":
        return web.Response(text=rendering.srt(segments), content_type="application/x-subrip", headers=headers)
    if form == "vtt":
        return web.Response(text=rendering.vtt(segments), content_type="text/vtt", headers=headers)
    if form == "text":
        return web.Response(text=text + "\n", content_type="text/plain", headers=headers)
    reply: dict[str, Any] = {"text": text, "usage": _usage(run)}
    if form == "verbose_json":
        reply |= {
            "task": "translate" if wanted.translate else "transcribe",
            "language": run.language,
            "duration": round(run.seconds, 3),
        }
        if wanted.segments:
            reply["segments"] = [_segment(place, segment, wanted) for place, segment in enumerate(segments)]
        if wanted.words:
            reply["words"] = [
                {"word": word.text.strip(), "start": round(word.begin, 2), "end": round(word.end, 2)}
                for part in parts
                for word in part.words
            ]
    return web.Response(body=orjson.dumps(reply), content_type="application/json", headers=headers)


def _segment(place: int, segment: Span, wanted: TranscriptionRequest) -> dict[str, Any]:
    raw = segment.text.encode()
    return {
        "id": place,
        "seek": round(segment.begin * 100),
        "start": round(segment.begin, 2),
        "end": round(segment.end, 2),
        "text": segment.text,
        "tokens": [],
        "temperature": wanted.temperature,
        "avg_logprob": None,
        "compression_ratio": round(len(raw) / len(zlib.compress(raw)), 3),
        "no_speech_prob": None,
    }


def _usage(run: Transcription) -> dict[str, Any]:
    return {"type": "duration", "seconds": round(run.seconds)}


async def _stream(request: web.Request, run: Transcription) -> web.StreamResponse:
    """One delta for each passage of at most 30 s, as soon as it is done."""
    async with EventStream(request, route_headers(run.route)) as stream:
        try:
            texts: list[str] = []
            async for part in run.parts:
                delta = part.text if texts else part.text.lstrip()
                texts.append(delta)
                await stream.send({"type": "transcript.text.delta", "delta": delta})
            done: dict[str, Any] = {
                "type": "transcript.text.done",
                "text": rendering.whole(texts),
                "usage": _usage(run),
                "device": run.route.device,
            }
            if run.busy_us is not None:
                done["npu_busy_delta_us"] = run.busy_us
            await stream.send(done)
        except NodeError as error:
            stream.failed(error)
            # The status line is gone: the error is the last event, and there is no `done`.
            await stream.send({"error": describe_error(error)}, "error")
    return stream.response


def _routes() -> list[web.RouteDef]:
    return [
        route
        for prefix in ("/v1", "/v3")
        for route in (
            web.post(f"{prefix}/audio/transcriptions", inference(_transcriptions)),
            web.post(f"{prefix}/audio/translations", inference(_translations)),
        )
    ]


_REPLIES = {"application/json": VerboseText, "text/plain": None, "text/vtt": None, "text/event-stream": None}

API = TaskApi(
    routes=_routes,
    operations=tuple(
        ApiOperation("post", f"{prefix}/audio/{path}", summary, _REPLIES, inference=True)
        for prefix in ("/v1", "/v3")
        for path, summary in (
            ("transcriptions", "Transcribe speech (multipart/form-data: file, model, …)"),
            ("translations", "Translate speech to English (multipart/form-data: file, model, …)"),
        )
    ),
    metrics=declare_speech_metrics,
)
