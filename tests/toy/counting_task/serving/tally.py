"""What the task needs while the node runs."""


class Tally:
    """Knows whether it was started with the node."""

    started = False

    async def close(self):
        self.started = False


def tally(_settings):
    """The tally of a node."""
    return Tally()
