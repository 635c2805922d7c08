"""Whether a reply belongs to the request that was sent: nodes repeat its `X-Request-ID`. No I/O.

HTTP/1.1 pairs requests and replies by their order alone. One reply too many on a connection that is kept alive would be
taken for the answer to the next request: another text's vector.
"""

from __future__ import annotations

from backend_client.errors import BadReply

# As many ids as are remembered: a surplus reply is one to an earlier request on the same connection.
_REMEMBERED = 4096
# So many replies in a row with ids that nobody here sent: a proxy has begun to give requests ids of its own.
_REPLACED = 3


class RequestIds:
    """Compares the ids of replies with those that were sent.

    A reply without an id (older nodes, some proxies) is accepted. So is one with an id that this client did not send,
    unless it is an answer and the node repeated ids before: proxies that give requests ids of their own never do, and
    others write refusals themselves.
    """

    def __init__(self) -> None:
        self._sent: dict[str, None] = {}
        # Nodes that repeat ids, and how many replies in a row came with an unknown one.
        self._unknown: dict[str, int] = {}

    def send(self, identifier: str | None) -> None:
        """Record that a request with this id is sent to a node."""
        if identifier is None:
            return
        self._sent[identifier] = None
        if len(self._sent) > _REMEMBERED:
            del self._sent[next(iter(self._sent))]

    def check(self, node: str, sent: str | None, received: str | None, *, answers: bool) -> None:
        """A reply came; `answers`: with the status 200.

        Raises BadReply for one to another request; its connection must not be used again.
        """
        if sent is None or received is None:
            return
        if sent == received:
            self._unknown[node] = 0
            return
        if received not in self._sent:
            if node not in self._unknown or not answers:
                return
            self._unknown[node] += 1
            if self._unknown[node] > _REPLACED:
                del self._unknown[node]
                return
        raise BadReply("the reply is one to another request: its X-Request-ID is not the one that was sent", node=node)
