"""The end of a job: when every fragment has a file, counts and checksums of all of them are written once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from backend_client.bulk.fragments import Fragment
from backend_client.bulk.job import FORMAT
from backend_client.bulk.quarantine import forget
from backend_client.bulk.receipts import REJECTED, Receipt, read_receipts, rebuilt, totals
from backend_client.bulk.steps import reached
from backend_client.bulk.stores import Store

SUCCESS = "_SUCCESS"
_REBUILT_AT_ONCE = 8


def finish(store: Store, fragments: Sequence[Fragment], known: Mapping[str, Receipt]) -> dict[str, Any]:
    """Write `_SUCCESS` for a job whose fragments are all committed; returns its content. Blocking. Raises OSError.

    `known` are receipts that were read already. Any number of processes may do this at once.
    """
    reached("all fragments committed")
    receipts = {**known, **read_receipts(store, [part for part in fragments if part.id not in known])}
    missing = [fragment for fragment in fragments if fragment.id not in receipts]
    with ThreadPoolExecutor(_REBUILT_AT_ONCE, "receipts") as pool:
        for receipt in pool.map(lambda fragment: rebuilt(store, fragment), missing):
            store.put(receipt.name, receipt.dump())
            receipts[receipt.fragment] = receipt
    every = [receipts[fragment.id] for fragment in fragments]
    content = {
        "format": FORMAT,
        "fragments": len(fragments),
        **totals(every),
        "files": {f"part-{receipt.fragment}.parquet": _file(receipt) for receipt in every},
    }
    store.create(SUCCESS, json.dumps(content, indent=1).encode() + b"\n")
    reached("success written")
    # Files of rejected rows whose attempt did not win, and what processes that died left.
    referred = {receipt.rejected_file for receipt in every}
    store.remove(f"{REJECTED}/{name}" for name in store.names(REJECTED) if name not in referred)
    forget(store)
    store.sweep(every=True)
    return content


def _file(receipt: Receipt) -> dict[str, Any]:
    rejected = {"rejected_file": f"{REJECTED}/{receipt.rejected_file}"} if receipt.rejected_file else {}
    return {
        "rows": receipt.rows,
        "rejected": receipt.rejected,
        "sha256": receipt.sha256,
        "size": receipt.size,
        **rejected,
    }
