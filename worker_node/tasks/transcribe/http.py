"""The routes of transcriptions and translations: forms with an upload in, text in five formats out."""

from __future__ import annotations

import errno
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import MultiDict
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from worker_node.core.errors import BadRequest, InsufficientStorage, NodeError, PayloadTooLarge, UnsupportedParameter
from worker_node.http.body import arrival, silence
from worker_node.http.body import explain as explain_invalid
from worker_node.http.context import busy_fields, request_context, route_headers
from worker_node.http.errors import describe_error
from worker_node.http.leniency import Ignored, reject_required_device
from worker_node.http.replies import Reply
from worker_node.http.request_state import NODE, STATE
from worker_node.http.sse import EventStream
from worker_node.http.task import ApiOperation, TaskApi
from worker_node.tasks.transcribe import service
from worker_node.tasks.transcribe.building import TranscriptionModel, VoiceChoice, find_voice
from worker_node.tasks.transcribe.messages import Span
from worker_node.tasks.transcribe.options import AudioOptions
from worker_node.tasks.transcribe.service import (
    SpokenPart,
    Transcription,
    TranscriptionRequest,
    audio_decoder,
    declare_speech_metrics,
    find_model,
    transcribe,
)

Format = Literal["json", "text", "srt", "vtt", "verbose_json"]
_STRATEGY, _GRANULARITIES = "chunking_strategy", "timestamp_granularities"


class ServerVad(BaseModel):
    """`chunking_strategy` as an object."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["server_vad"]
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    silence_duration_ms: Annotated[float, Field(ge=0, le=60_000)] | None = None
    prefix_padding_ms: Annotated[float, Field(ge=0, le=5_000)] | None = None


class SpeechForm(BaseModel):
    """The fields of a form that have an effect."""

    model: str | None = None
    language: Annotated[str, Field(pattern="^[A-Za-z]{2,3}$")] | None = None
    prompt: str = ""
    response_format: Format = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] = 0.0
    timestamp_granularities: frozenset[Literal["word", "segment"]] = frozenset()
    stream: bool = False
    vad_filter: bool | None = None
    chunking_strategy: Literal["auto"] | ServerVad | None = None

    @classmethod
    def read(cls, fields: MultiDict[str]) -> SpeechForm:
        """What a form asks for. Raises BadRequest."""
        given = _given(fields)
        try:
            form = cls.model_validate(given)
        except ValidationError as error:
            message, param = explain_invalid(error, given)
            raise BadRequest(message, param=param) from None
        if form.timestamp_granularities and form.response_format != "verbose_json":
            raise BadRequest(f"{_GRANULARITIES}[] needs response_format verbose_json", param=f"{_GRANULARITIES}[]")
        return form

    def wanted(self, *, translate: bool) -> TranscriptionRequest:
        """The request."""
        words = self.timestamp_granularities == {"word"}
        return TranscriptionRequest(
            model=self.model,
            language=None if self.language is None else self.language.lower(),
            translate=translate,
            segments=self.response_format in {"srt", "vtt"} or (self.response_format == "verbose_json" and not words),
            words="word" in self.timestamp_granularities,
            prompt=self.prompt,
            temperature=self.temperature,
            voice=self.voice(),
        )

    def voice(self) -> VoiceChoice:
        """Whether and how silence is skipped; `vad_filter` is stronger than `chunking_strategy`."""
        strategy = self.chunking_strategy
        wanted = self.vad_filter if strategy is None or self.vad_filter is not None else True
        param = None if wanted is None else _STRATEGY if self.vad_filter is None else "vad_filter"
        if not isinstance(strategy, ServerVad):
            return VoiceChoice(wanted, param=param, insist=self.vad_filter is not None)
        silence, padding = strategy.silence_duration_ms, strategy.prefix_padding_ms
        return VoiceChoice(
            wanted,
            strategy.threshold,
            None if silence is None else round(silence),
            None if padding is None else round(padding),
            param=param,
        )


def _given(fields: MultiDict[str]) -> dict[str, Any]:
    """The fields by name; an empty one counts as not sent. Client libraries send members of objects as fields."""
    given: dict[str, Any] = {name: value.strip() for name, value in fields.items() if value.strip()}
    if granularities := fields.getall(f"{_GRANULARITIES}[]", []) + fields.getall(_GRANULARITIES, []):
        given[_GRANULARITIES] = granularities
    members = {name: value for name, value in given.items() if name.startswith(f"{_STRATEGY}[")}
    if members:
        given[_STRATEGY] = {name.removeprefix(f"{_STRATEGY}[")[:-1]: value for name, value in members.items()}
    elif str(given.get(_STRATEGY, "")).startswith("{"):
        with suppress(orjson.JSONDecodeError):
            given[_STRATEGY] = orjson.loads(given[_STRATEGY])
    return given


# Reads a multipart upload: small fields into memory, the file to disk, everything bounded.

_LONGEST_FIELD = 16_384
_MOST_FIELDS = 32
_CHUNK = 1 << 18
# Sent by OpenAI's client libraries; without effect on a Whisper model.
_HINTS = frozenset({"include[]", "include", "known_speaker_names[]", "known_speaker_references[]"})
# Those about voice activity: client libraries send the members of an object as fields of their own.
_VOICE = frozenset({"vad_filter", _STRATEGY, *(f"{_STRATEGY}[{member}]" for member in ServerVad.model_fields)})
_KNOWN = frozenset({*SpeechForm.model_fields, f"{_GRANULARITIES}[]"}) - _VOICE
# What aiohttp's reader raises for bodies that are not framed as they should be.
_MALFORMED = (
    ValueError,
    LookupError,
    TypeError,
    RuntimeError,
    AssertionError,
    HttpProcessingError,
    web.RequestPayloadError,
)


@dataclass(slots=True)
class UploadForm:
    """The fields of an upload, in order of arrival; the file is at `path`, of `size` bytes (None: there was none)."""

    path: Path
    size: int | None = None
    fields: MultiDict[str] = field(default_factory=MultiDict)

    def note_ignored(self, request: web.Request, *, detects_voice: bool) -> None:
        """List fields without effect in the reply, or refuse them where the node is strict. Raises
        UnsupportedParameter.

        `detects_voice`: what the form says of voice activity has an effect.
        """
        reject_required_device(self.fields)
        state = request[STATE]
        strict = state.node.settings.unknown_fields == "reject"
        ignored = Ignored()
        for name in dict.fromkeys(self.fields):
            if name in _KNOWN or (detects_voice and name in _VOICE):
                continue
            if strict and name not in _HINTS | _VOICE:
                raise UnsupportedParameter(f"{name[:80]!r} is not a field of this request", param=name[:80])
            ignored.add(name)
        state.ignored = ignored


async def read_form(request: web.Request, path: Path, most_bytes: int) -> UploadForm:
    """Read the upload; its file, of at most `most_bytes`, goes to `path`.

    Raises BadRequest, PayloadTooLarge, RequestTimeout, DeadlineExceeded, InsufficientStorage.
    """
    if not request.content_type.startswith("multipart/"):
        raise BadRequest("send the audio as multipart/form-data, with the fields file and model")
    # Fields and the frames between them take some room beside the file.
    if (request.content_length or 0) > most_bytes + (1 << 20):
        raise PayloadTooLarge(f"the body has {request.content_length} bytes; the file may have {most_bytes}")
    form = UploadForm(path)
    try:
        async with arrival(request):
            reader = await request.multipart()
            while (part := await reader.next()) is not None:
                if not isinstance(part, BodyPartReader):
                    raise BadRequest("parts of multipart/form-data must not be multipart themselves")
                if part.name == "file" and form.size is None:
                    form.size = await _store(part, path, most_bytes, request)
                elif part.name == "file":
                    raise BadRequest("file: one file a request", param="file")
                else:
                    await _field(part, form, request)
    except _MALFORMED:
        if request.transport is None:
            raise ConnectionResetError("the client left before its body was read") from None
        raise BadRequest("the body is not multipart/form-data as its headers say") from None
    if form.size is None:
        raise BadRequest("file is missing", param="file")
    if form.size == 0:
        raise BadRequest("file is empty", param="file")
    return form


async def _field(part: BodyPartReader, form: UploadForm, request: web.Request) -> None:
    if part.name is None:
        raise BadRequest("a part of the body has no name")
    if len(form.fields) >= _MOST_FIELDS:
        raise BadRequest(f"more than {_MOST_FIELDS} fields")
    data = bytearray()
    while chunk := await _chunk(part, request):
        data += chunk
        if len(data) > _LONGEST_FIELD:
            raise BadRequest(f"{part.name[:80]}: more than {_LONGEST_FIELD} bytes", param=part.name[:80])
    try:
        form.fields.add(part.name, data.decode())
    except UnicodeDecodeError:
        raise BadRequest(f"{part.name[:80]}: not UTF-8", param=part.name[:80]) from None


async def _store(part: BodyPartReader, path: Path, most_bytes: int, request: web.Request) -> int:
    size = 0
    try:
        with path.open("wb") as file:
            while chunk := await _chunk(part, request):
                size += len(chunk)
                if size > most_bytes:
                    raise PayloadTooLarge(f"file: more than {most_bytes} bytes, the limit of this node")
                # A page-cache write; only a full disk makes it slow.
                file.write(chunk)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise InsufficientStorage(f"the disk with {path.parent} is full; free space, or set TMPDIR") from None
        raise
    return size


async def _chunk(part: BodyPartReader, request: web.Request) -> bytes:
    async with silence(request):
        return await part.read_chunk(_CHUNK)


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
    # A file that is too large for every model here is not read; the model's own bound is checked where it is known.
    bounds = [model.limits for model in node.manager.models if isinstance(model, TranscriptionModel)]
    most = max((bound.max_audio_mb for bound in bounds), default=AudioOptions().max_audio_mb) * _MEBIBYTE
    with scratch_directory() as scratch:
        form = await read_form(request, scratch / "upload", most)
        asked = SpeechForm.read(form.fields)
        wanted, reply_form = asked.wanted(translate=translate), asked.response_format
        model = await find_model(node.services, wanted, context)
        voice = await find_voice(node.manager, model.limits, wanted.voice, context.deadline)
        form.note_ignored(request, detects_voice=voice is not None or not wanted.voice.wanted)
        if form.size is not None and form.size > model.limits.max_audio_mb * _MEBIBYTE:
            raise PayloadTooLarge(f"file: more than {model.limits.max_audio_mb} MiB, the limit of {model.id}")
        decoder = node.services.parts.of(audio_decoder)
        async with transcribe(node.services, decoder, context, wanted, voice, scratch / "upload", scratch) as run:
            if asked.stream and reply_form in {"json", "text"}:
                return await _stream(request, run)
            parts = [part async for part in run.parts]
            headers = route_headers(run.route, run.busy)
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


def _rendered(
    form: str, run: Transcription, parts: list[SpokenPart], wanted: TranscriptionRequest, headers: dict[str, str]
) -> web.Response:
    text = service.whole(part.text for part in parts)
    segments = [segment for part in parts for segment in part.segments]
    if form == "srt":
        return web.Response(text=service.srt(segments), content_type="application/x-subrip", headers=headers)
    if form == "vtt":
        return web.Response(text=service.vtt(segments), content_type="text/vtt", headers=headers)
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
                {"word": word.text.strip(), "start": round(word.begin, 3), "end": round(word.end, 3)}
                for part in parts
                for word in part.words
            ]
    return web.Response(body=orjson.dumps(reply), content_type="application/json", headers=headers)


def _segment(place: int, segment: Span, wanted: TranscriptionRequest) -> dict[str, Any]:
    raw = segment.text.encode()
    return {
        "id": place,
        "seek": round(segment.begin * 100),
        "start": round(segment.begin, 3),
        "end": round(segment.end, 3),
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
                "text": service.whole(texts),
                "usage": _usage(run),
                "device": run.route.device,
            }
            done |= busy_fields(run.busy)
            await stream.send(done)
        except NodeError as error:
            stream.failed(error)
            # The status line is gone: the error is the last event, and there is no `done`.
            await stream.send({"error": describe_error(error)}, "error")
    return stream.response


_REPLIES = {"application/json": VerboseText, "text/plain": None, "text/vtt": None, "text/event-stream": None}

API = TaskApi(
    operations=tuple(
        ApiOperation("post", f"{prefix}/audio/{path}", handler, summary, _REPLIES, inference=True)
        for prefix in ("/v1", "/v3")
        for path, handler, summary in (
            ("transcriptions", _transcriptions, "Transcribe speech (multipart/form-data: file, model, …)"),
            ("translations", _translations, "Translate speech to English (multipart/form-data: file, model, …)"),
        )
    ),
    metrics=declare_speech_metrics,
)
