"""Where a job's output goes. The one promise everything rests on: of several writers of a name, the first wins."""

from backend_client.bulk.stores.opening import open_store, prove_exclusive
from backend_client.bulk.stores.store import OutputFailed, Store, read_many

__all__ = ["OutputFailed", "Store", "open_store", "prove_exclusive", "read_many"]
