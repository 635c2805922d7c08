"""A streamed answer of the cloud, passed on as it arrives, without a second attempt."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from backend_client._cloud.attempt import CloudAttempt
from backend_client.errors import ClientClosed, CloudError, StreamInterrupted
from backend_client.results import Usage

I = TypeVar("I")  # noqa: E741  (an item of a stream)


@dataclass(frozen=True, slots=True)
class CloudReading(Generic[I]):
    """How the items of a stream are read: which is the last, what text each adds, and the usage that it reports."""

    ends: Callable[[I], bool]
    text: Callable[[I], str]
    usage: Callable[[I], Usage | None]


async def follow(
    attempt: CloudAttempt, items: AsyncGenerator[I, None], item: I, reading: CloudReading[I]
) -> AsyncGenerator[I, None]:
    """Yield `item` and all that follow, the last one once the attempt has succeeded.

    Raises StreamInterrupted, with the text so far, when the stream fails.
    """
    parts: list[str] = []
    usage: Usage | None = None
    failed: CloudError | ClientClosed | None = None
    try:
        while not reading.ends(item):
            parts.append(reading.text(item))
            usage = reading.usage(item) or usage
            yield item
            item = await attempt.run(anext(items))
        attempt.succeeded(reading.usage(item) or usage)
    except (CloudError, ClientClosed) as error:
        failed = error
    finally:
        attempt.abandoned()
        await items.aclose()
    if failed is not None:
        raise StreamInterrupted.after(parts, failed, attempts=failed.attempts, request_id=attempt.job.request_id)
    yield item
