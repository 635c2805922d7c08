"""The wiring of the node's web application, in one place."""

from __future__ import annotations

from aiohttp import web

from worker_node.http import admin, dashboard, explain, health, metrics, models, ollama, openai, openapi, pages
from worker_node.http.connection import admit_connection, answering_expectations
from worker_node.http.dashboard import EventLog, Histories
from worker_node.http.errors import also_below_v3
from worker_node.http.leniency import IGNORED_NAMES, NODE, IgnoredNames
from worker_node.http.middleware import (
    API_KEYS,
    ApiKeys,
    OriginPolicy,
    before_each_head,
    cors_headers,
    errors_as,
    guard_origins,
    hide_versions,
    list_ignored_fields,
    log_requests,
    note_head,
    require_key,
    tell_request_id,
    traced,
)
from worker_node.http.task import error_form, task_apis
from worker_node.node import Node
from worker_node.settings import NodeSettings


def make_app(node: Node) -> web.Application:
    """Return the application that serves `node`. Its engines are started and stopped by `server.run`."""
    keys = ApiKeys(_keys(node.settings))
    tracing = node.services.tracing
    origins = OriginPolicy.of(node.settings)

    def follow(settings: NodeSettings) -> None:
        keys.replace(_keys(settings))
        origins.replace(OriginPolicy.of(settings))

    node.followers.append(follow)
    middlewares = [
        log_requests(),
        *([traced(tracing)] if tracing.enabled else ()),
        errors_as(error_form, admit_connection, guard_origins(origins), require_key(keys)),
    ]
    app = web.Application(middlewares=middlewares)
    app[NODE] = node
    app[API_KEYS] = keys
    app.on_response_prepare.append(
        before_each_head(note_head, hide_versions, tell_request_id, list_ignored_fields, cors_headers(origins))
    )
    app[IGNORED_NAMES] = IgnoredNames()

    async def close_manager(_app: web.Application) -> None:
        await node.manager.close()

    # Before the connections are closed: a reply with the progress of a pull ends with it.
    app.on_shutdown.append(close_manager)
    app[dashboard.HISTORIES] = Histories()
    app[dashboard.EVENTS] = EventLog()
    app.cleanup_ctx.append(dashboard.keep_history)
    node.telemetry.registry.register(metrics.NodeCollector(node))
    app[models.PULLS] = models.PullJobs()
    of_tasks = tuple(task_apis())
    own = (pages, health, explain, metrics, dashboard, openapi, models, admin, openai, ollama)
    for routes in (*(module.routes for module in own), *(api.routes for api in of_tasks)):
        app.add_routes(answering_expectations(also_below_v3(routes())))
    for api in of_tasks:
        if api.prepare is not None:
            api.prepare(app, node)
        if api.metrics is not None:
            api.metrics(node.telemetry)
    return app


def _keys(settings: NodeSettings) -> list[str]:
    return [key.get_secret_value() for key in settings.api_keys]
