"""The wiring of the node's web application, in one place."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web

from worker_node.http import dashboard, health, metrics, models, pages, routes
from worker_node.http.access import ACCESS, Access
from worker_node.http.body import check_encoding, expect_continue
from worker_node.http.connection import admit_connection
from worker_node.http.context import NODE
from worker_node.http.middleware import (
    begin_reply,
    describe_request,
    errors_as,
    inference,
    log_requests,
    name_as_npu_proxy,
    traced,
)
from worker_node.http.replies import OPENAI_PREFIX, OVMS_PREFIX
from worker_node.http.routes import ApiOperation, error_form, task_apis
from worker_node.node import Node


def make_app(node: Node) -> web.Application:
    """Return the application that serves `node`. Its engines are started and stopped by `server.run`."""
    access, tracing = Access(node.settings), node.services.tracing
    node.followers.append(access.adopt)
    middlewares = [
        log_requests(),
        *([traced(tracing)] if tracing.enabled else ()),
        errors_as(error_form, admit_connection, access.check_origin, access.check_key, check_encoding),
    ]
    app = web.Application(middlewares=middlewares)
    app[NODE] = node
    app[ACCESS] = access
    app.on_response_prepare.extend((begin_reply, describe_request, access.add_headers))
    if node.settings.npu_proxy_names:
        app.on_response_prepare.append(name_as_npu_proxy)

    # Before the connections are closed: a reply with the progress of a pull ends with it.
    app.on_shutdown.append(lambda _app: node.manager.close())
    app[dashboard.DASHBOARD] = shown = dashboard.Dashboard(node)
    app.cleanup_ctx.append(shown.running)
    node.telemetry.registry.register(metrics.NodeCollector(node))
    pages.read_pages()  # a file that is missing keeps the node from starting
    app[models.PULLS] = {}
    app[routes.DESCRIBED] = described = operations()
    app.add_routes(_routes(described))
    for api in task_apis():
        if api.metrics is not None:
            node.telemetry.declare(api.metrics)
    return app


# A refusal before the body is read comes before `100 Continue`.
_LATE_BODY = {"expect_handler": expect_continue}


def operations() -> tuple[ApiOperation, ...]:
    core = (health, metrics, dashboard, routes, models, pages)
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
