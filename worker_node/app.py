"""The wiring of the node's web application, in one place."""

from __future__ import annotations

from aiohttp import web

from worker_node.api import explain, health, metrics, openapi
from worker_node.api.admin import routes as admin
from worker_node.api.authorization import API_KEYS, ApiKeys
from worker_node.api.dashboard import page as dashboard
from worker_node.api.dashboard.events import EventLog
from worker_node.api.dashboard.history import Histories
from worker_node.api.dialects import also_below_v3
from worker_node.api.expectation import answering_expectations
from worker_node.api.keys import IGNORED_NAMES, NODE
from worker_node.api.leniency import IgnoredNames
from worker_node.api.middleware import (
    before_each_head,
    errors_as,
    hide_versions,
    list_ignored_fields,
    log_requests,
    note_head,
    require_key,
    tell_request_id,
)
from worker_node.api.models import pulling as model_pulls
from worker_node.api.models import routes as node_models
from worker_node.api.ollama import models as ollama_models
from worker_node.api.openai import models as openai_models
from worker_node.api.origins import OriginPolicy, cors_headers, guard_origins
from worker_node.api.pages import routes as pages
from worker_node.api.task import error_form, task_apis
from worker_node.api.tracing import traced
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
        errors_as(error_form, guard_origins(origins), require_key(keys)),
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
    app[model_pulls.PULLS] = model_pulls.PullJobs()
    people = (pages, health, explain, metrics, dashboard, openapi)
    models = (model_pulls, node_models, admin, openai_models, ollama_models)
    of_tasks = tuple(task_apis())
    rooms = [room.routes for room in (*people, *models)]
    for routes in (*rooms, *(api.routes for api in of_tasks)):
        app.add_routes(answering_expectations(also_below_v3(routes())))
    for api in of_tasks:
        if api.prepare is not None:
            api.prepare(app, node)
        if api.metrics is not None:
            api.metrics(node.telemetry)
    return app


def _keys(settings: NodeSettings) -> list[str]:
    return [key.get_secret_value() for key in settings.api_keys]
