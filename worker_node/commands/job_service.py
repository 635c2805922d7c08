"""Shared by the commands that run jobs in this process: the service, and errors that reveal nothing of the jobs."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from worker_node.core.errors import InternalError, NodeError

if TYPE_CHECKING:
    from worker_node.bounded.service import JobService

T = TypeVar("T")


def with_service(args: argparse.Namespace, work: Callable[[JobService], Awaitable[T]]) -> T:
    """Return what `work` makes of a service that lives as long as it does.

    Raises NodeError; an unforeseen failure becomes one that names its type and no more, since its text might hold what
    was given or generated.
    """
    from worker_node.bounded.profile import job_service
    from worker_node.commands.serve import load_bounded_settings

    settings = load_bounded_settings(args)

    async def run() -> T:
        async with job_service(settings) as service:
            return await work(service)

    try:
        return asyncio.run(run())
    except NodeError:
        raise
    except Exception as error:  # noqa: BLE001  (see above)
        raise InternalError(
            f"failed with {type(error).__name__}; nothing is shown of what was being worked on"
        ) from None
