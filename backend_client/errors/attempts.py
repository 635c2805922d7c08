"""One attempt on one node failed; another may succeed."""

from __future__ import annotations

from typing import Any, ClassVar

from backend_client.errors.base import NPUError
from backend_client.results import FailureKind


class NodeError(NPUError):
    """One attempt on one node failed. Another attempt may succeed.

    `sent` is False only when it is certain that the node never saw the request; `what` is the message without the node.
    `misrouted` is True when the node can never serve this request; it is not asked for that model again, so sending the
    request elsewhere cannot multiply load.
    """

    failure: ClassVar[FailureKind] = FailureKind.NONE
    sent: ClassVar[bool] = True
    misrouted: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        node: str,
        status: int | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{node}: {message}")
        self.what = message
        self.node = node
        self.status = status
        self.code = code
        self.retry_after = retry_after


class NodeUnreachable(NodeError):
    """No connection could be made, so the request was never sent."""

    failure = FailureKind.CONNECTION
    sent = False


class ConnectionLost(NodeError):
    """The connection broke between the request and the end of the answer."""

    failure = FailureKind.CONNECTION


class BadReply(NodeError):
    """The reply breaks the protocol: it cannot be parsed, is a redirect, has the wrong length, or holds NaN.

    The connection worked, so one of them says no more about the node than a 500 does; unless it `contradicts` what the
    node's own /health says of the model.
    """

    failure = FailureKind.SERVER

    def __init__(self, message: str, *, contradicts: bool = False, **more: Any) -> None:
        super().__init__(message, **more)
        self.contradicts = contradicts


class NodeFailed(NodeError):
    """The node answered 5xx."""

    failure = FailureKind.SERVER


class AttemptTimeout(NodeError):
    """The node took longer than one attempt may. Whether that counts against it depends on how long it was silent."""


class KeyRefused(NodeError):
    """This node does not accept the API key."""

    misrouted = True


class NodeLost(NodeError):
    """The node's probes failed while it worked on the request."""


class NodeOverloaded(NodeError):
    """429: the node is busy until `retry_after` has passed."""


class NodeNotServing(NodeError):
    """503 (or 408): the node is up, but cannot take this request now; `code` says why."""


class ModelMissing(NodeError):
    """This node does not know the model."""

    misrouted = True


class SpaceChanged(NodeError):
    """The node answered in another vector space than the one the call is bound to."""

    misrouted = True
