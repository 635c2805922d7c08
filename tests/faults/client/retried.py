"""Calls that a second node answers."""


async def until_retried(call):
    """The first result that took more than one attempt."""
    while len((result := await call()).attempts) == 1:
        pass
    return result
