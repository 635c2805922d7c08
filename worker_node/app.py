"""The wiring of the node's web application, in one place."""

from __future__ import annotations

from aiohttp import web

from worker_node.api import explain, health, metrics, native
from worker_node.api.keys import NODE, Node
from worker_node.api.middleware import identify_and_log, on_prepare, render_errors, require_key
from worker_node.api.openai import chat, completions, embeddings
from worker_node.api.openai import models as openai_models


def make_app(node: Node) -> web.Application:
    """Return the application that serves `node`. Its engines are started and stopped by `server.run`."""
    keys = tuple(key.get_secret_value() for key in node.settings.api_keys)
    app = web.Application(middlewares=[identify_and_log, render_errors, require_key(keys)])
    app[NODE] = node
    app.on_response_prepare.append(on_prepare)
    node.registry.telemetry.registry.register(metrics.NodeCollector(node))
    for room in (health, explain, metrics, native, openai_models, embeddings, completions, chat):
        app.add_routes(room.routes())
    return app
