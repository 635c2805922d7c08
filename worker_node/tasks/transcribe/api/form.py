"""Reads a multipart upload: small fields into memory, the file to disk, everything bounded."""

from __future__ import annotations

import errno
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import MultiDict

from worker_node.api.arrival import arrival, silence
from worker_node.api.keys import STATE
from worker_node.api.leniency import Ignored
from worker_node.core.errors import BadRequest, InsufficientStorage, PayloadTooLarge, UnsupportedParameter
from worker_node.tasks.transcribe.api import voice
from worker_node.tasks.transcribe.serving.service import TranscriptionRequest

Format = Literal["json", "text", "srt", "vtt", "verbose_json"]
_FORMATS = get_args(Format)
_LONGEST_FIELD = 16_384
_MOST_FIELDS = 32
_CHUNK = 1 << 18
# Sent by OpenAI's client libraries; without effect on a Whisper model.
_HINTS = frozenset({"include[]", "include", "known_speaker_names[]", "known_speaker_references[]"})
_KNOWN = frozenset(
    {
        "model",
        "language",
        "prompt",
        "response_format",
        "temperature",
        "timestamp_granularities[]",
        "timestamp_granularities",
        "stream",
    }
)
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
_LANGUAGE = re.compile(r"[a-z]{2,3}")


@dataclass(slots=True)
class UploadForm:
    """The fields of an upload, in order of arrival; the file is at `path`, of `size` bytes (None: there was none)."""

    path: Path
    size: int | None = None
    fields: MultiDict[str] = field(default_factory=MultiDict)

    def wanted(self, *, translate: bool) -> TranscriptionRequest:
        """What the fields ask for. Raises BadRequest."""
        form = self.form()
        granularities = {
            *self.fields.getall("timestamp_granularities[]", []),
            *self.fields.getall("timestamp_granularities", []),
        }
        if unknown := granularities - {"word", "segment"}:
            raise BadRequest(
                f"timestamp_granularities[]: {min(unknown)!r:.40} is none of word, segment",
                param="timestamp_granularities[]",
            )
        if granularities and form != "verbose_json":
            raise BadRequest(
                "timestamp_granularities[] needs response_format verbose_json", param="timestamp_granularities[]"
            )
        language = self.fields.get("language", "").strip().lower() or None
        if language is not None and not _LANGUAGE.fullmatch(language):
            raise BadRequest('language is a code such as "en"', param="language")
        return TranscriptionRequest(
            model=self.fields.get("model") or None,
            language=language,
            translate=translate,
            segments=form in {"srt", "vtt"} or (form == "verbose_json" and granularities != {"word"}),
            words="word" in granularities,
            prompt=self.fields.get("prompt", ""),
            temperature=self._number("temperature"),
            voice=voice.read_voice(self.fields),
        )

    def form(self) -> Format:
        """The form of the reply. Raises BadRequest."""
        value = self.fields.get("response_format", "json")
        for known in _FORMATS:
            if value == known:
                return known  # type: ignore[no-any-return]  # get_args loses the type
        raise BadRequest(f"response_format is one of {', '.join(_FORMATS)}", param="response_format")

    def stream(self) -> bool:
        """Whether the reply is a stream of events. Raises BadRequest."""
        value = self.fields.get("stream", "false").lower()
        if value not in {"true", "false", "1", "0", ""}:
            raise BadRequest("stream is true or false", param="stream")
        return value in {"true", "1"}

    def note_ignored(self, request: web.Request, *, detects_voice: bool) -> None:
        """List fields without effect in the reply, or refuse them where the node is strict.

        `detects_voice`: what the form says of voice activity has an effect.
        """
        state = request[STATE]
        strict = state.node.settings.unknown_fields == "reject"
        ignored = Ignored()
        for name in dict.fromkeys(self.fields):
            if name in _KNOWN or (detects_voice and name in voice.FIELDS):
                continue
            if strict and name not in _HINTS | voice.FIELDS:
                raise UnsupportedParameter(f"{name[:80]!r} is not a field of this request", param=name[:80])
            ignored.add(name)
        state.ignored = ignored

    def _number(self, name: str) -> float:
        text = self.fields.get(name, "") or "0"
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 1:
            raise BadRequest(f"{name} is a number from 0 to 1", param=name)
        return value


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
        raise BadRequest("the body is no multipart/form-data as its headers say") from None
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
