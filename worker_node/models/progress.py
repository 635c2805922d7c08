"""How far a pull is. Apart from the rest, since commands import it where only the client is installed."""

from __future__ import annotations


class Progress:
    """Listens to one piece of work, and ignores it here; each call comes from the thread that does the work."""

    def stage(self, name: str, total: int | None = None) -> None:
        """A new stage begins; `total` is its size in bytes where that is known."""

    def update(self, done: int) -> None:
        """`done` bytes of the current stage are done."""
