"""How long work says where it is, without knowing who is looking."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A listener to one piece of work; each call comes from the thread that does the work."""

    def stage(self, name: str, total: int | None = None) -> None:
        """A new stage begins; `total` is its size in bytes where that is known."""

    def update(self, done: int) -> None:
        """So many bytes of the current stage are done."""


class Silent:
    """Progress that nobody watches."""

    def stage(self, name: str, total: int | None = None) -> None:
        """Ignore it."""

    def update(self, done: int) -> None:
        """Ignore it."""
