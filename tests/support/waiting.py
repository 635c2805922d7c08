"""Waiting for what other processes bring about."""

import asyncio


async def eventually(condition):
    """Wait until the condition holds; the limit is for a hang."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)
