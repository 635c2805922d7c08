"""A scripted node in a thread of its own, for tests that block theirs."""

import asyncio
import contextlib
import threading


@contextlib.contextmanager
def served_in_thread(node):
    """Run the node; the value is its URL."""
    started = threading.Event()
    loops = []
    done = asyncio.Event()

    async def serve():
        loops.append(asyncio.get_running_loop())
        async with node.running():
            started.set()
            await done.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert started.wait(100)
        yield node.url
    finally:
        loops[0].call_soon_threadsafe(done.set)
        thread.join()
