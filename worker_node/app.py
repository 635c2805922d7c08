"""The wiring of the node's web application, in one place."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web

from worker_node.http import dashboard, health, metrics, models, openapi, pages
from worker_node.http.access import API_KEYS, ApiKeys, OriginPolicy
from worker_node.http.body import check_encoding, expect_continue
from worker_node.http.connection import admit_connection
from worker_node.http.errors import OPENAI_PREFIX, OVMS_PREFIX
from worker_node.http.middleware import (
    begin_reply,
    describe_request,
    errors_as,
    inference,
    log_requests,
    name_as_npu_proxy,
    traced,
)
from worker_node.http.request_state import NODE
from worker_node.http.task import ApiOperation, error_form, task_apis
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
        errors_as(error_form, admit_connection, origins.check, keys.check, check_encoding),
    ]
    app = web.Application(middlewares=middlewares)
    app[NODE] = node
    app[API_KEYS] = keys
    app.on_response_prepare.extend((begin_reply, describe_request, origins.add_headers))
    if node.settings.npu_proxy_names:
        app.on_response_prepare.append(name_as_npu_proxy)

    async def close_manager(_app: web.Application) -> None:
        await node.manager.close()

    # Before the connections are closed: a reply with the progress of a pull ends with it.
    app.on_shutdown.append(close_manager)
    app[dashboard.DASHBOARD] = shown = dashboard.Dashboard(node)
    app.cleanup_ctx.append(shown.running)
    node.telemetry.registry.register(metrics.NodeCollector(node))
    pages.read_pages()  # a file that is missing keeps the node from starting
    app[models.PULLS] = models.PullJobs()
    app[openapi.DESCRIBED] = described = operations()
    app.add_routes(_routes(described))
    for api in task_apis():
        if api.metrics is not None:
            api.metrics(node.telemetry)
    return app


# A refusal before the body is read comes before `100 Continue`.
_LATE_BODY = {"expect_handler": expect_continue}


def _keys(settings: NodeSettings) -> list[str]:
    return [key.get_secret_value() for key in settings.api_keys]


def operations() -> tuple[ApiOperation, ...]:
    """The node's own and those of every task."""
    core = (health, metrics, dashboard, openapi, models, pages)
    tasks_own = (operation for api in task_apis() for operation in api.operations)
    return (*(operation for module in core for operation in module.OPERATIONS), *tasks_own)


def _routes(described: Iterable[ApiOperation]) -> list[web.RouteDef]:
    """The routes, and those of OpenAI's dialect also where clients of OpenVINO Model Server look for them."""
    given = [
        web.RouteDef(
            each.method.upper(), each.path, inference(each.handler) if each.inference else each.handler, _LATE_BODY
        )
        for each in described
    ]
    return given + [
        web.RouteDef(route.method, OVMS_PREFIX + route.path.removeprefix(OPENAI_PREFIX), route.handler, _LATE_BODY)
        for route in given
        if route.path.startswith(OPENAI_PREFIX)
    ]
