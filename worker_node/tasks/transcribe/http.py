"""The routes of transcriptions and translations: forms with an upload in, text in five formats out."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import orjson
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import MultiDict
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from worker_node.core.errors import BadRequest, InsufficientStorage, NodeError, PayloadTooLarge, UnsupportedParameter
from worker_node.core.types import RequestContext
from worker_node.http.body import arrival, reject_required_device, silence
from worker_node.http.body import explain as explain_invalid
from worker_node.http.context import NODE, STATE, Ignored, busy_fields, request_context, route_headers
from worker_node.http.middleware import note_failure
from worker_node.http.replies import Reply, describe_error, json_response
from worker_node.http.routes import EVENTS, JSON, TEXT, ApiOperation, TaskApi
from worker_node.http.sse import EventStream
from worker_node.tasks.transcribe.audio import full_disk_reported
from worker_node.tasks.transcribe.building import TranscriptionModel
from worker_node.tasks.transcribe.service import (
    SpeechMetrics,
    Transcription,
    VoiceChoice,
    find_model,
    find_voice,
    transcribe,
)
from worker_node.tasks.transcribe.task import AudioOptions, Span, TranscribeJob

Format = Literal["json", "text", "srt", "vtt", "verbose_json"]
_STRATEGY, _GRANULARITIES = "chunking_strategy", "timestamp_granularities"


class ServerVad(BaseModel):
    """`chunking_strategy` as an object."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["server_vad"]
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    silence_duration_ms: Annotated[int, Field(ge=0, le=60_000)] | None = None
    prefix_padding_ms: Annotated[int, Field(ge=0, le=5_000)] | None = None


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

    def job(self, context: RequestContext, *, translate: bool) -> TranscribeJob:
        """What every window of the audio is asked."""
        words = self.timestamp_granularities == {"word"}
        return TranscribeJob(
            0,
            b"",
            context.deadline,
            language=None if self.language is None else self.language.lower(),
            translate=translate,
            segments=self.response_format in {"srt", "vtt"} or (self.response_format == "verbose_json" and not words),
            words="word" in self.timestamp_granularities,
            prompt=self.prompt,
            temperature=self.temperature,
            interactive=context.interactive,
        )

    def voice(self) -> VoiceChoice:
        """Whether and how silence is skipped; `vad_filter` is stronger than `chunking_strategy`."""
        strategy = self.chunking_strategy
        wanted = self.vad_filter if strategy is None or self.vad_filter is not None else True
        param = None if wanted is None else _STRATEGY if self.vad_filter is None else "vad_filter"
        if not isinstance(strategy, ServerVad):
            return VoiceChoice(wanted, param=param, insist=self.vad_filter is not None)
        silence_ms, padding_ms = strategy.silence_duration_ms, strategy.prefix_padding_ms
        return VoiceChoice(wanted, strategy.threshold, silence_ms, padding_ms, param)


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


def _note_ignored(request: web.Request, fields: MultiDict[str], *, detects_voice: bool) -> None:
    """List fields without effect in the reply, or refuse them where the node is strict. Raises UnsupportedParameter.

    `detects_voice`: what the form says of voice activity has an effect.
    """
    reject_required_device(fields)
    state = request[STATE]
    strict = state.node.settings.unknown_fields == "reject"
    ignored = Ignored()
    for name in dict.fromkeys(fields):
        if name in _KNOWN or (detects_voice and name in _VOICE):
            continue
        if strict and name not in _HINTS | _VOICE:
            raise UnsupportedParameter(f"{name[:80]!r} is not a field of this request", param=name[:80])
        ignored.add(name)
    state.ignored = ignored


async def read_form(request: web.Request, path: Path, most_bytes: int) -> tuple[MultiDict[str], int]:
    """Read the upload; its file, of at most `most_bytes`, goes to `path`. Returns the other fields and the file's size.

    Raises BadRequest, PayloadTooLarge, RequestTimeout, DeadlineExceeded, InsufficientStorage.
    """
    if not request.content_type.startswith("multipart/"):
        raise BadRequest("send the audio as multipart/form-data, with the fields file and model")

    # Fields and the frames between them take some room beside the file.
    if (request.content_length or 0) > most_bytes + (1 << 20):
        raise PayloadTooLarge(f"the body has {request.content_length} bytes; the file may have {most_bytes}")
    fields: MultiDict[str] = MultiDict()
    size: int | None = None
    try:
        async with arrival(request):
            reader = await request.multipart()
            while (part := await reader.next()) is not None:
                if not isinstance(part, BodyPartReader):
                    raise BadRequest("parts of multipart/form-data must not be multipart themselves")
                if part.name == "file" and size is None:
                    refusal = PayloadTooLarge(f"file: more than {most_bytes} bytes, the limit of this node")
                    with full_disk_reported(path.parent), path.open("wb") as file:
                        # A write to the page cache; only a full disk makes it slow.
                        size = await _receive(part, request, file, most_bytes, refusal)
                elif part.name == "file":
                    raise BadRequest("file: one file a request", param="file")
                elif part.name is None:
                    raise BadRequest("a part of the body has no name")
                elif len(fields) >= _MOST_FIELDS:
                    raise BadRequest(f"more than {_MOST_FIELDS} fields")
                else:
                    fields.add(part.name, await _field(part, part.name[:80], request))
    except _MALFORMED:
        if request.transport is None:
            raise ConnectionResetError("the client left before its body was read") from None
        raise BadRequest("the body is not multipart/form-data as its headers say") from None

    if not size:
        raise BadRequest("file is missing" if size is None else "file is empty", param="file")
    return fields, size


async def _field(part: BodyPartReader, name: str, request: web.Request) -> str:
    data = BytesIO()
    await _receive(
        part, request, data, _LONGEST_FIELD, BadRequest(f"{name}: more than {_LONGEST_FIELD} bytes", param=name)
    )
    try:
        return data.getvalue().decode()
    except UnicodeDecodeError:
        raise BadRequest(f"{name}: not UTF-8", param=name) from None


async def _receive(part: BodyPartReader, request: web.Request, target: BinaryIO, most: int, refusal: NodeError) -> int:
    """Write a part to `target` as it arrives; returns its bytes. Raises the `refusal` for more than `most`."""
    size = 0
    while True:
        async with silence(request):
            chunk = await part.read_chunk(_CHUNK)
        if not chunk:
            return size
        size += len(chunk)
        if size > most:
            raise refusal
        target.write(chunk)


_MEBIBYTE = 1 << 20


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
    duration: Annotated[float, Field(description="Seconds of audio")]
    text: str
    segments: list[Segment] | None = None
    words: list[Word] | None = None
    usage: dict[str, Any]


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


def srt(segments: Iterable[Span]) -> str:
    """SubRip: numbered blocks with a comma before the milliseconds."""
    return "\n".join(f"{number}\n{_cue(span, ',')}" for number, span in enumerate(segments, 1))


def vtt(segments: Iterable[Span]) -> str:
    """WebVTT: blocks under a header, with a point before the milliseconds."""
    return "\n".join(("WEBVTT\n", *(_cue(span, ".") for span in segments)))


def _cue(span: Span, point: str) -> str:
    # A blank line, or an arrow, would end or begin a cue.
    text = " ".join(span.text.split()).replace("-->", "->")
    return f"{_clock(span.begin, point)} --> {_clock(span.end, point)}\n{text}\n"


def _clock(seconds: float, point: str) -> str:
    milliseconds = max(0, round(seconds * 1000))
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"


# The replies that are no JSON, by response_format: the type of their content, and what makes it.
_TEXTS: dict[str, tuple[str, Callable[[str, Sequence[Span]], str]]] = {
    "text": ("text/plain", lambda text, _segments: text + "\n"),
    "srt": ("application/x-subrip", lambda _text, segments: srt(segments)),
    "vtt": ("text/vtt", lambda _text, segments: vtt(segments)),
}


def _verbose(
    run: Transcription, wanted: TranscribeJob, segments: Sequence[Span], words: Sequence[Span]
) -> dict[str, Any]:
    """What verbose_json adds to json."""
    reply: dict[str, Any] = {
        "task": "translate" if wanted.translate else "transcribe",
        "language": run.language,
        "duration": round(run.seconds, 3),
    }
    if wanted.segments:
        reply["segments"] = [_segment(place, segment, wanted) for place, segment in enumerate(segments)]
    if wanted.words:
        reply["words"] = [
            {"word": word.text.strip(), "start": round(word.begin, 3), "end": round(word.end, 3)} for word in words
        ]
    return reply


def _segment(place: int, segment: Span, wanted: TranscribeJob) -> dict[str, Any]:
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


async def _stream(request: web.Request, run: Transcription) -> web.StreamResponse:
    """One delta for each passage of at most 30 s, as soon as it is done."""
    async with EventStream(request, route_headers(run.route)) as stream:
        try:
            texts: list[str] = []
            async for part in run.parts():
                delta = part.text if texts else part.text.lstrip()
                texts.append(delta)
                await stream.send({"type": "transcript.text.delta", "delta": delta})
            done: dict[str, Any] = {
                "type": "transcript.text.done",
                "text": "".join(texts).strip(),
                "usage": {"type": "duration", "seconds": round(run.seconds)},
                "device": run.route.device,
            }
            done |= busy_fields(run.busy)
            await stream.send(done)
        except NodeError as error:
            note_failure(request, error)
            # The status line is gone: the error is the last event, and there is no `done`.
            await stream.send({"error": describe_error(error)}, "error")

    return stream.response


async def _answer(request: web.Request) -> web.StreamResponse:
    node, context = request.app[NODE], request_context(request)

    # A file that is too large for every model here is not read; the model's own bound is checked where it is known.
    bounds = [model.limits for model in node.manager.models if isinstance(model, TranscriptionModel)]
    most = max((bound.max_audio_mb for bound in bounds), default=AudioOptions().max_audio_mb) * _MEBIBYTE
    with scratch_directory() as scratch:
        upload = scratch / "upload"
        fields, size = await read_form(request, upload, most)
        form = SpeechForm.read(fields)
        wanted, choice = form.job(context, translate=request.path.endswith("/translations")), form.voice()
        model = await find_model(node.services, form.model, wanted, context)
        voice = await find_voice(node.manager, model.limits, choice, context.deadline)
        _note_ignored(request, fields, detects_voice=voice is not None or not choice.wanted)
        if size > model.limits.max_audio_mb * _MEBIBYTE:
            raise PayloadTooLarge(f"file: more than {model.limits.max_audio_mb} MiB, the limit of {model.id}")
        async with transcribe(node.services, model, context, wanted, voice, upload, scratch) as run:
            if form.stream and form.response_format in {"json", "text"}:
                return await _stream(request, run)
            parts = [part async for part in run.parts()]
            # Each text begins with a blank of its own where its language has one.
            text = "".join(part.text for part in parts).strip()
            segments = [segment for part in parts for segment in part.segments]
            headers = route_headers(run.route, run.busy)
            if form.response_format in _TEXTS:
                content_type, render = _TEXTS[form.response_format]
                return web.Response(text=render(text, segments), content_type=content_type, headers=headers)
            reply: dict[str, Any] = {"text": text, "usage": {"type": "duration", "seconds": round(run.seconds)}}
            if form.response_format == "verbose_json":
                words = [word for part in parts for word in part.words]
                reply |= _verbose(run, wanted, segments, words)
            return json_response(reply, headers=headers)


API = TaskApi(
    operations=tuple(
        ApiOperation(
            "post",
            f"{prefix}/audio/{path}",
            _answer,
            f"{summary} (multipart/form-data: file, model, …)",
            {JSON: VerboseText, TEXT: None, "text/vtt": None, EVENTS: None},
            inference=True,
        )
        for prefix in ("/v1", "/v3")
        for path, summary in (
            ("transcriptions", "Transcribe speech"),
            ("translations", "Translate speech to English"),
        )
    ),
    metrics=SpeechMetrics,
)
