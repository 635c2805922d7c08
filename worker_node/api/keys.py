"""The typed keys of what an application and its requests carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from worker_node.api.leniency import Ignored, IgnoredNames
from worker_node.node import Node


@dataclass(frozen=True, slots=True)
class DryRun:
    """The body and headers of a request that is only to be explained, in place of the HTTP request's own."""

    body: bytes
    headers: Mapping[str, str]


NODE = web.AppKey("node", Node)
IGNORED_NAMES = web.AppKey("ignored_names", IgnoredNames)
DRY_RUN = web.RequestKey("dry_run", DryRun)
IGNORED = web.RequestKey("ignored", Ignored)
REQUEST_ID = web.RequestKey("request_id", str)
ARRIVED = web.RequestKey("arrived", float)
# Set once the head of the reply has gone.
BEGUN = web.RequestKey("begun", bool)
