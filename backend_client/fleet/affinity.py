"""Affinity: which node a conversation belongs to."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from backend_client.fleet.node import Node
from backend_client.http.messages import WRITERS, Request, plain_name
from backend_client.http.routes import runs_on_device

SESSION_HEADER = "x-session-id"
_LOAD_BOUND = 1.25
_CONVERSATIONS = 4096


class Affinity:
    """Sends the requests of a conversation to one node, which has the beginning of its prompt in its prefix cache.

    It is the node that was asked last, for the last few thousand conversations.
    Others get the first node by rendezvous hashing: all clients of a fleet agree on it,
    and when a node comes or goes no conversation of another node moves.

    A node gets no request of a conversation while its work, as this client sees it,
    is above 1.25 of the mean and more than one request: below that, the mean says nothing.

    `hits` counts requests that went to the node of their conversation,
    `misses` those that went to another one.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[bytes, str] = OrderedDict()
        self.hits = 0
        self.misses = 0

    def choose(self, conversation: bytes, nodes: Sequence[Node], request: Request, *, retry: bool = False) -> Node:
        """One of the nodes (at least one), which is the conversation's from now on. A `retry` is not counted."""
        name = plain_name(request.model or "")
        loads = {node.url: node.work(node.names.get(name)) for node in nodes}
        most = max(1, _LOAD_BOUND * sum(loads.values()) / len(loads))

        last = self._last.pop(conversation, None)
        if last in loads and loads[last] <= most:
            url = last
        else:
            free = [url for url, load in loads.items() if load <= most]
            # Not the less loaded of the first two: each client sees another load,
            # and those that fail every request at once are always idle.
            url = max(free, key=lambda url: blake2b(url.encode(), key=conversation, digest_size=8).digest())

        if last is not None and not retry:
            self.hits += url == last
            self.misses += url != last

        self._last[conversation] = url
        if len(self._last) > _CONVERSATIONS:
            self._last.popitem(last=False)
        return next(node for node in nodes if node.url == url)


def conversation_key(request: Request) -> bytes | None:
    """What the requests of a conversation, and only they, have in common; None for a request of none.

    The caller names it: the header X-Session-Id, else OpenAI's `prompt_cache_key` or `user`,
    which Anthropic calls `metadata.user_id`. Else it is how the chat begins.

    It is hashed with the tenant, so that no tenant can name the conversation of another.
    """
    if request.kind not in WRITERS or not runs_on_device(request):
        return None

    body, metadata = request.body, request.body.get("metadata")
    headers = {name.lower(): value for name, value in request.extra_headers.items()}
    named: Any = headers.get(SESSION_HEADER)
    named = named or body.get("prompt_cache_key") or body.get("user")
    if not named and isinstance(metadata, Mapping):
        named = metadata.get("user_id")
    named = named or _beginning(body)
    if not named:
        return None

    try:
        text = json.dumps([request.tenant, plain_name(request.model or ""), named])
    except (TypeError, ValueError, RecursionError):
        # The caller of a gateway may send anything; its node refuses it.
        return None
    return blake2b(text.encode(), digest_size=16).digest()


def _beginning(body: Mapping[str, Any]) -> list[Any] | None:
    """The text of a chat up to the first message of its user, and the tools; None for what is not a chat.

    Not the first message alone: that is often the same system prompt for all conversations of a service.
    """
    messages = body.get("messages") or body.get("input")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        return None

    texts: list[Any] = []
    for message in messages:
        if not isinstance(message, Mapping):
            return None
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        # Images are megabytes, and the text beside them says enough.
        texts += [part.get("text") for part in parts if isinstance(part, Mapping)]
        if message.get("role") == "user":
            break

    return [body.get("system"), body.get("instructions"), body.get("tools"), *texts] if texts else None
