"""The cloud by itself: an OpenAI-compatible API behind the methods of `NPUClient`, with prices and a spend cap.

    from backend_client.cloud import CloudClient

`InferenceClient` uses it as the fallback of the nodes. Importing this module imports the OpenAI SDK, which is slow.
"""

from backend_client._api.cloud_client import CloudClient
from backend_client._cloud.ledger import Ledger, Tally
from backend_client.settings import CloudSettings, Price

__all__ = ["CloudClient", "CloudSettings", "Ledger", "Price", "Tally"]
