"""The cloud by itself: an OpenAI-compatible API behind the methods of `NPUClient`, with prices and a spend cap.

    from backend_client.cloud import CloudClient

`InferenceClient` uses it as the fallback of the nodes. The OpenAI SDK, which is slow to import, is imported for
`CloudClient` only.
"""

# May import `sdk`, `calls` and what is below. Begin reading with `backend`, then `attempt` and `ledger`.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backend_client.cloud.ledger import Ledger, Tally
from backend_client.settings import CloudSettings, Price

if TYPE_CHECKING:
    from backend_client.cloud.backend import CloudClient

__all__ = ["CloudClient", "CloudSettings", "Ledger", "Price", "Tally"]


def __getattr__(name: str) -> Any:
    if name == "CloudClient":
        from backend_client.cloud.backend import CloudClient  # noqa: PLC0415  (imports the OpenAI SDK)

        return CloudClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
