"""Every error of the client.

    NPUError                            .attempts: what was tried, in order   .request_id: what the node's log calls it
    ├── ConfigurationError              the settings, or the way the client is used, are wrong
    │   └── ClientClosed                the client was closed before or during the call
    ├── RequestRejected                 it would be refused again: no retry, no fallback
    │   ├── InvalidArgument             an argument or option is wrong: nothing was sent (also a ValueError)
    │   ├── AuthenticationFailed        401, 403
    │   ├── ContextLengthExceeded       the prompt, or prompt and output together, are too long
    │   └── PayloadTooLarge             413
    ├── NPUUnavailableError             no node can serve it: go elsewhere       .retry_after: or come back then
    │   ├── ModelNotFound               no node serves the model (also a RequestRejected, with status 404)
    │   │   └── NotOffered              no node has a model for this task: nothing was sent
    │   ├── FleetOverloaded             nodes are up, but busy for longer than the call may wait
    │   ├── VectorSpaceMismatch         nodes are up, but answer in another vector space
    │   └── DeadlineExceeded            the call's time was up (also a TimeoutError)
    ├── InvalidAnswer                   the answer is not what the schema demands        .text
    ├── StreamInterrupted               the answer stopped in the middle         .partial_text: what had arrived
    ├── EmbedManyFailed                 some batches failed                      .vectors .failures
    │   └── EmbedManyUnavailable        …all for want of a node (also an NPUUnavailableError)
    ├── CloudError
    │   ├── CloudUnavailable            the cloud did not answer
    │   ├── CloudRejected               the cloud refused the request (also a RequestRejected)
    │   └── SpendCapReached             it might cost more than the cap leaves
    └── NodeError                       one attempt on one node failed; callers meet these in `.attempts`   .node
        ├── NodeUnreachable             no connection: the request was never sent
        ├── ConnectionLost              the connection broke before the answer was complete
        ├── BadReply                    what came back is not a node's answer
        ├── NodeFailed                  5xx
        ├── AttemptTimeout              the node took longer than one attempt may
        ├── KeyRefused                  401 or 403 here; another node may accept the API key
        ├── NodeLost                    its probes failed while it worked on the request
        ├── NodeOverloaded              429: busy until `.retry_after`, not dead
        ├── NodeNotServing              503: draining, loading, or the required device is missing
        ├── ModelMissing                404 for this model here; another node may serve it
        └── SpaceChanged                an answer in another vector space than the call's

Messages say what happened, on which node, and what to do next. None holds a prompt, an answer or a key. They name nodes
and models, so they belong in the log of the service, not in its replies. Every error can be pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from backend_client.results import Attempt, FailureKind

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# No package index has this project: anyone may register its name there.
INSTALL_EXTRA = "pip install '.[{}]' in the project's checkout"


class NPUError(Exception):
    """Base of all. `attempts` holds each try on each node (and the cloud), oldest first."""

    # A node's refusal as it came (`http.messages.Reply`), for callers who speak its dialect.
    reply: Any = None

    def __init__(self, message: str, *, attempts: Sequence[Attempt] = (), request_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.attempts: tuple[Attempt, ...] = tuple(attempts)
        self.request_id = request_id

    def __reduce__(self) -> tuple[Callable[..., NPUError], tuple[Any, ...]]:
        """Pickle without calling the constructor: its keyword arguments are not in `args`."""
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(kind: type[NPUError], args: tuple[Any, ...], state: dict[str, Any]) -> NPUError:
    error: NPUError = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigurationError(NPUError):
    """The settings are wrong, or the client is used in a way that cannot work."""


class ClientClosed(ConfigurationError):
    """The client was closed before or during the call. Neither retried nor sent to the cloud."""


# Requests that would be refused again: no retry, no fallback.


class RequestRejected(NPUError):
    """The request itself was refused; sending it again, here or elsewhere, will not help."""

    def __init__(
        self,
        message: str,
        *,
        node: str | None = None,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.node = node
        self.status = status
        self.code = code
        self.param = param


class InvalidArgument(RequestRejected, ValueError):
    """An argument or option of the call is wrong, and nothing was sent. `param` names it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param)


class AuthenticationFailed(RequestRejected):
    """The API key is missing or not one of the node's."""


class ContextLengthExceeded(RequestRejected):
    """The prompt, or prompt and output together, are longer than any placement of the model allows."""


class PayloadTooLarge(RequestRejected):
    """The request is larger than the node takes."""


class CloudError(NPUError):
    """The cloud leg failed."""


class CloudUnavailable(CloudError):
    """The cloud could not be reached, was busy, failed, did not accept our key or model, or is in quarantine.

    `status` is that of its HTTP reply, if there was one; `retry_after`: seconds, where it says so.
    """

    def __init__(self, message: str, *, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class CloudRejected(CloudError, RequestRejected):
    """The cloud answered 400, 413 or 422, or cannot do what the request asks; it would refuse it again."""


class SpendCapReached(CloudError):
    """The request might cost more than the spend cap leaves; nothing was sent."""


# One attempt on one node failed; another may succeed.


class NodeError(NPUError):
    """One attempt on one node failed. Another attempt may succeed.

    `sent` is False only when it is certain that the node never saw the request; `what` is the message without the node.
    `misrouted` is True when the node can never serve this request: the call goes to another node or ends, and asks no
    node twice.
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


# Answers that broke off, or are not what was asked for.


class StreamInterrupted(NPUError):
    """A streamed answer stopped after its first token; it is neither retried nor taken over by the cloud.

    `partial_text` is what had arrived. It is kept out of the message and of the repr.
    """

    def __init__(
        self, message: str, *, partial_text: str = "", attempts: Sequence[Attempt] = (), request_id: str | None = None
    ) -> None:
        super().__init__(message, attempts=attempts, request_id=request_id)
        self.partial_text = partial_text

    @classmethod
    def after(
        cls, parts: Sequence[str], failed: NPUError, *, attempts: Sequence[Attempt], request_id: str
    ) -> StreamInterrupted:
        """The error for an answer that stopped after these parts because of `failed`."""
        text = "".join(parts)
        message = f"the answer stopped after {len(text)} characters: {failed.message}"
        return cls(message, partial_text=text, attempts=attempts, request_id=request_id)


class InvalidAnswer(NPUError):
    """An answer does not validate against the schema that it was asked to match.

    `text` is the answer, and `finish_reason` why it ended (length: it was cut). Neither is in the message or the repr.
    """

    def __init__(self, message: str, *, text: str = "", finish_reason: str = "", **more: Any) -> None:
        super().__init__(message, **more)
        self.text = text
        self.finish_reason = finish_reason


# Nobody could serve the call, in time or at all.


class NPUUnavailableError(NPUError):
    """No node can serve the request now. `retry_after`: seconds until one, or the cloud, is expected to, where known.

    `cloud_error` is how the fallback failed, if it was asked.
    """

    def __init__(
        self,
        message: str,
        *,
        attempts: Sequence[Attempt] = (),
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, attempts=attempts, request_id=request_id)
        self.retry_after = retry_after
        self.cloud_error: CloudError | None = None

    def without_cloud(self, why: str, error: CloudError | None = None) -> Self:
        """This error, saying also why the cloud did not help; `error` is how it failed, if it was asked."""
        self.message = f"{self.message}; {why}"
        self.args = (self.message,)
        self.cloud_error = error
        pause = error.retry_after if isinstance(error, CloudUnavailable) else None
        if pause is not None:
            self.retry_after = pause if self.retry_after is None else min(pause, self.retry_after)
        return self


class ModelNotFound(RequestRejected, NPUUnavailableError):
    """No node serves a model of that name now. The cloud is asked if the settings map the model; it is not retried."""


class NotOffered(ModelNotFound):
    """No node of the fleet has a model for this task, so nothing was sent."""


class FleetOverloaded(NPUUnavailableError):
    """Nodes are up, but all that could serve the request are busy for longer than it may wait."""


class VectorSpaceMismatch(NPUUnavailableError):
    """Nodes are up, but none answers in the vector space that this client's earlier vectors are in."""


class DeadlineExceeded(NPUUnavailableError, TimeoutError):
    """The call's time was up before a node had answered."""


@dataclass(frozen=True, slots=True)
class BatchFailure:
    """Texts `start` to `stop` (exclusive) were not embedded."""

    start: int
    stop: int
    error: NPUError


class EmbedManyFailed(NPUError):
    """Some batches could not be embedded.

    `vectors` is float32 (n, d), all of one `space`, with NaN in the rows that failed; both are None when no batch
    succeeded. `failures` names the rows of each failed batch and why.
    """

    def __init__(
        self,
        message: str,
        *,
        vectors: npt.NDArray[np.float32] | None = None,
        space: str | None = None,
        failures: Sequence[BatchFailure] = (),
    ) -> None:
        attempts = [attempt for failure in failures for attempt in failure.error.attempts]
        super().__init__(message, attempts=attempts)
        self.vectors = vectors
        self.space = space
        self.failures = tuple(failures)


class EmbedManyUnavailable(EmbedManyFailed, NPUUnavailableError):
    """Some batches could not be embedded because no node could serve them: the fleet died on the way.

    `vectors` and `failures` as in EmbedManyFailed; `retry_after` is the longest that a batch names.
    """

    def __init__(self, message: str, *, failures: Sequence[BatchFailure] = (), **more: Any) -> None:
        super().__init__(message, failures=failures, **more)
        waits = [failure.error.retry_after for failure in failures if isinstance(failure.error, NPUUnavailableError)]
        self.retry_after = max((wait for wait in waits if wait is not None), default=None)
