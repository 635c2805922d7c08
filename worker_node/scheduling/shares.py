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
    """The credit of waiting batch work, which goes first once the credit pays for its next piece of work.

    Work done while nothing else waits costs no credit. `balance` is in interactive tokens, of which INTERACTIVE_WEIGHT
    pay for one of batch work.
    """

    balance: int = 0

    def interactive_served(self, tokens: int) -> None:
        """Record that interactive work got so many tokens while batch work was waiting."""
        self.balance += tokens

    def pays_for(self, tokens: int) -> bool:
        """Whether batch work of this size goes before interactive work now."""
        return self.balance >= tokens * INTERACTIVE_WEIGHT

    def charge(self, tokens: int) -> None:
        """Charge batch work of this size that went before interactive work; a negative number refunds unused tokens."""
        self.balance -= tokens * INTERACTIVE_WEIGHT

    def nothing_waits(self) -> None:
        """Record that no batch work waits any more: its credit is dropped, its debt is kept."""
        self.balance = min(self.balance, 0)
