"""Weighted service of two priorities: interactive work first, and a guaranteed share of the tokens for batch work."""

from __future__ import annotations

from dataclasses import dataclass

# Of ten tokens that an engine serves while both kinds of work wait, at least one is batch work's.
INTERACTIVE_WEIGHT = 9
BATCH_SHARE = 1 / (INTERACTIVE_WEIGHT + 1)
# A generation that runs cannot be interrupted, so batch work never holds all sequences where there are several.
_BATCH_SEQUENCES = 0.75


def batch_sequences(sequences: int) -> int:
    """How many of the sequences of an engine batch work may hold."""
    return max(1, int(sequences * _BATCH_SEQUENCES))


@dataclass(slots=True)
class BatchCredit:
    """What waiting batch work is owed. It goes first once that pays for its next piece of work.

    Work that nobody else was waiting for is free: idle time is never charged. `balance` is in interactive tokens, of
    which INTERACTIVE_WEIGHT pay for one of batch work.
    """

    balance: int = 0

    def interactive_served(self, tokens: int) -> None:
        """Interactive work got so many tokens while batch work was waiting."""
        self.balance += tokens

    def pays_for(self, tokens: int) -> bool:
        """Whether batch work of this size goes before interactive work now."""
        return self.balance >= tokens * INTERACTIVE_WEIGHT

    def charge(self, tokens: int) -> None:
        """Batch work of this size went before interactive work; a negative number gives back what it did not use."""
        self.balance -= tokens * INTERACTIVE_WEIGHT

    def nothing_waits(self) -> None:
        """The last waiting batch work is gone: what it was owed does not last, what it owes does."""
        self.balance = min(self.balance, 0)
