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

from backend_client.errors.answers import InvalidAnswer, StreamInterrupted
from backend_client.errors.attempts import (
    AttemptTimeout,
    BadReply,
    ConnectionLost,
    KeyRefused,
    ModelMissing,
    NodeError,
    NodeFailed,
    NodeLost,
    NodeNotServing,
    NodeOverloaded,
    NodeUnreachable,
    SpaceChanged,
)
from backend_client.errors.base import ClientClosed, ConfigurationError, NPUError
from backend_client.errors.cloud import CloudError, CloudRejected, CloudUnavailable, SpendCapReached
from backend_client.errors.rejected import (
    AuthenticationFailed,
    ContextLengthExceeded,
    InvalidArgument,
    PayloadTooLarge,
    RequestRejected,
)
from backend_client.errors.unavailable import (
    BatchFailure,
    DeadlineExceeded,
    EmbedManyFailed,
    EmbedManyUnavailable,
    FleetOverloaded,
    ModelNotFound,
    NotOffered,
    NPUUnavailableError,
    VectorSpaceMismatch,
)

__all__ = [
    "AttemptTimeout",
    "AuthenticationFailed",
    "BadReply",
    "BatchFailure",
    "ClientClosed",
    "CloudError",
    "CloudRejected",
    "CloudUnavailable",
    "ConfigurationError",
    "ConnectionLost",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "EmbedManyFailed",
    "EmbedManyUnavailable",
    "FleetOverloaded",
    "InvalidAnswer",
    "InvalidArgument",
    "KeyRefused",
    "ModelMissing",
    "ModelNotFound",
    "NPUError",
    "NPUUnavailableError",
    "NodeError",
    "NodeFailed",
    "NodeLost",
    "NodeNotServing",
    "NodeOverloaded",
    "NodeUnreachable",
    "NotOffered",
    "PayloadTooLarge",
    "RequestRejected",
    "SpaceChanged",
    "SpendCapReached",
    "StreamInterrupted",
    "VectorSpaceMismatch",
]
