"""Form fields that have silence skipped: OpenAI's `chunking_strategy`, faster-whisper-server's `vad_filter`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
from multidict import MultiDict

from worker_node.core.errors import BadRequest, UnsupportedParameter
from worker_node.tasks.transcribe.serving.voice import VoiceChoice

_STRATEGY, _FILTER = "chunking_strategy", "vad_filter"
_AUTO, _SERVER = "auto", "server_vad"
_LONGEST_SILENCE_MS, _LONGEST_PADDING_MS = 60_000, 5_000
_MEMBERS = ("type", "threshold", "silence_duration_ms", "prefix_padding_ms")
# Client libraries send the members of an object as fields of their own.
FIELDS = frozenset({_STRATEGY, _FILTER, *(f"{_STRATEGY}[{member}]" for member in _MEMBERS)})


def read_voice(fields: MultiDict[str]) -> VoiceChoice:
    """What a form asks for. Raises BadRequest."""
    strategy = _strategy(fields)
    switch = fields.get(_FILTER, "").strip().lower()
    if switch not in {"", "true", "false", "1", "0"}:
        raise BadRequest(f"{_FILTER} is true or false", param=_FILTER)
    if not switch:
        return strategy
    wanted = switch in {"true", "1"}
    if strategy.wanted and not wanted:
        raise BadRequest(f"{_FILTER} is false, and {_STRATEGY} asks for it; send one of them", param=_FILTER)
    return VoiceChoice(wanted, strategy.threshold, strategy.silence_ms, strategy.padding_ms, _FILTER)


def _strategy(fields: MultiDict[str]) -> VoiceChoice:
    text = fields.get(_STRATEGY, "").strip()
    members: dict[str, Any] = {
        name.removeprefix(f"{_STRATEGY}[").removesuffix("]"): value
        for name, value in fields.items()
        if name.startswith(f"{_STRATEGY}[") and name.endswith("]")
    }
    if text in {"", "null"} and not members:
        return VoiceChoice()
    if text == _AUTO and not members:
        return VoiceChoice(True, param=_STRATEGY, insist=False)
    if text:
        try:
            parsed = orjson.loads(text)
        except orjson.JSONDecodeError:
            parsed = None
        if not isinstance(parsed, dict) or members:
            raise BadRequest(f'{_STRATEGY} is "{_AUTO}" or an object with the type "{_SERVER}"', param=_STRATEGY)
        members = parsed
    return _server_vad(members)


def _server_vad(members: Mapping[str, Any]) -> VoiceChoice:
    if unknown := members.keys() - set(_MEMBERS):
        raise UnsupportedParameter(f"{_STRATEGY}: {min(unknown)!r:.80} is not a member of it", param=_STRATEGY)
    if members.get("type") != _SERVER:
        raise BadRequest(f'{_STRATEGY}: its type is "{_SERVER}"', param=_STRATEGY)
    silence = _number(members, "silence_duration_ms", _LONGEST_SILENCE_MS)
    padding = _number(members, "prefix_padding_ms", _LONGEST_PADDING_MS)
    return VoiceChoice(
        True,
        _number(members, "threshold", 1),
        None if silence is None else round(silence),
        None if padding is None else round(padding),
        param=_STRATEGY,
    )


def _number(members: Mapping[str, Any], name: str, most: float) -> float | None:
    value = members.get(name)
    if value is None or value == "":
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= most:
        raise BadRequest(f"{_STRATEGY}: {name} is a number from 0 to {most:g}", param=_STRATEGY)
    return number
