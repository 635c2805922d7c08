"""Whether a reply belongs to the request that was sent: nodes repeat its `X-Request-ID`. No I/O.

HTTP/1.1 pairs requests and replies by their order alone. One reply too many on a connection that is kept alive would be
taken for the answer to the next request: another text's vector.
"""

from __future__ import annotations

import random

from backend_client.errors import BadReply

# As many ids as are remembered: a surplus reply is one to an earlier request on the same connection.
_REMEMBERED = 4096


def new_request_id() -> str:
    """An id as nodes make them: `req_` and 24 hex digits. It must be unlike all others, not hard to guess."""
    return f"req_{random.getrandbits(96):024x}"


class RequestIds:
    """Compares the ids of replies with those that were sent.

    A node whose last probe was answered with its id repeats the ids of all requests. Of others (older nodes, proxies
    that give requests ids of their own) any reply is accepted but one to another request of this client.
    """

    def __init__(self) -> None:
        self._sent: dict[str, None] = {}
        self._repeating: set[str] = set()

    def send(self, identifier: str) -> None:
        """Record that a request with this id is sent to a node."""
        self._sent[identifier] = None
        if len(self._sent) > _REMEMBERED:
            del self._sent[next(iter(self._sent))]

    def probed(self, node: str, sent: str, received: str | None) -> None:
        """Record the id in the reply to a probe."""
        (self._repeating.add if received == sent else self._repeating.discard)(node)

    def check(self, node: str, sent: str, received: str | None, *, by_node: bool) -> None:
        """A reply came; `by_node`: it is one that only nodes send, and no proxy writes itself.

        Raises BadReply for one to another request; its connection must not be used again.
        """
        if received != sent and (received in self._sent or (by_node and node in self._repeating)):
            raise BadReply(
                "the reply does not repeat the X-Request-ID that was sent: it is another request's", node=node
            )
