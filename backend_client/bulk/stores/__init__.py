"""Where a job's output goes. The one promise everything rests on: of several writers of a name, the first wins.

Begin with `store.Store`; `local` is a directory, `objects` an object store. `open_store` below chooses."""

from __future__ import annotations

import secrets
from pathlib import Path

from backend_client.bulk.optional import file_system
from backend_client.bulk.stores.local import LocalStore
from backend_client.bulk.stores.objects import ObjectStore
from backend_client.bulk.stores.store import OutputFailed, Store, read_many
from backend_client.errors import ConfigurationError


def open_store(url: str) -> Store:
    """The store of an output. Writes nothing. Raises ConfigurationError for a scheme that nobody knows."""
    system, path = file_system(url)
    local = system.protocol if isinstance(system.protocol, str) else system.protocol[0]
    return LocalStore(Path(path)) if local in {"file", "local"} else ObjectStore(system, path.rstrip("/"))


def prove_exclusive(store: Store, url: str) -> None:
    """Show by trying that the store refuses a second writer of a name.

    Raises ConfigurationError for one that does not, or that cannot be written.
    """
    probe = f"_probe-{secrets.token_hex(8)}"
    try:
        exclusive = store.create(probe, b"1") and not store.create(probe, b"2")
        store.remove([probe])
    except (OSError, NotImplementedError, ValueError) as error:
        problem = f"{url} cannot be written: {error}"
    else:
        if exclusive:
            return
        problem = f"{url} cannot refuse a second writer of a name, so rows could be written twice: choose another store"
    raise ConfigurationError(problem)


# Where a job's output goes. The one promise everything rests on: of several writers of a name, the first wins.

__all__ = ["OutputFailed", "Store", "open_store", "prove_exclusive", "read_many"]
