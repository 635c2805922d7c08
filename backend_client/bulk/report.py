"""The report of a run, or of a job's progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """The exit status of a run."""

    COMPLETE = 0
    """Every fragment of the job, or of the shard, has a file."""
    FAILED = 1
    """The run stopped with an error; what was committed is kept."""
    QUARANTINED = 3
    """Everything has a file but the fragments that are listed."""
    TOO_MANY_REJECTED = 4
    """More rows were rejected than `max_rejected` allows."""
    INCOMPLETE = 5
    """Of `status`: there are fragments to do yet, and none is quarantined."""
    INTERRUPTED = 130
    """Stopped by a signal; run the same command to continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkReport:
    """`done` of `fragments` have a file, with `rows` rows; `rejected` were set aside. `rows_now`: of this run.

    `quarantined` says why, by fragment. `served` counts rows of this run by node and device. `excluded` are nodes that
    answer in another vector space. `lost`: workers that died. `success`: `_SUCCESS` is written.
    """

    exit_code: ExitCode
    fragments: int
    done: int
    rows: int
    rejected: int
    rows_now: int = 0
    seconds: float = 0.0
    quarantined: Mapping[str, str] = field(default_factory=dict)
    served: Mapping[str, int] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    failures: int = 0
    lost: int = 0
    success: bool = False
    message: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {
            **values,
            "exit_code": int(self.exit_code),
            "quarantined": dict(self.quarantined),
            "served": dict(self.served),
            "rows_per_second": round(self.rows_now / self.seconds, 1) if self.seconds else 0.0,
        }
