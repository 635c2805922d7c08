"""The bounds on one schema: its depth, the steps that its translation takes, and what its grammar costs to compile."""

from __future__ import annotations

from worker_node.errors import UnsupportedParameter

MAX_DEPTH = 64
MAX_SCHEMA_BYTES = 256 * 1024
MAX_GRAMMAR_CHARACTERS = 200_000
# A step is one keyword, name, value or merged part that is looked at: 1 to 2 microseconds.
MAX_STEPS = 200_000
QUICK_STEPS = 5_000
# `grammars.cost` and docs/schemas.md say what these count, and how the bounds were measured.
MAX_COST = 100_000
MAX_WIDTH = 32


class OutOfSteps(UnsupportedParameter):
    """The translation of a schema takes more steps than allowed."""


class Budget:
    """Counts the steps of one translation. `where` is the schema's place in the request."""

    def __init__(self, where: str, steps: int = MAX_STEPS) -> None:
        self._where = where
        self._most = steps
        self.spent = 0

    def spend(self, steps: int = 1) -> None:
        """Count steps. Raises OutOfSteps beyond the bound."""
        self.spent += steps
        if self.spent > self._most:
            raise OutOfSteps(
                f"{self._where}: translating the schema takes more than {self._most} steps, the bound here; "
                "use fewer or smaller parts, above all under allOf, oneOf and $ref",
                param=self._where,
            )
