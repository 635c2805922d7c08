"""The API reference as HTML, from the description that /openapi.json gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from worker_node.api.openapi import document

_Json = Mapping[str, Any]
_METHODS = ("get", "post", "delete")


def reference() -> str:
    """The body of the page: every operation, and every schema that one of them names."""
    spec = document()
    schemas: _Json = spec["components"]["schemas"]
    return "".join(
        [
            "<h1>API reference</h1>",
            '<p><a href="/">This node</a> · <a href="/dashboard">dashboard</a> · ',
            '<a href="/openapi.json">openapi.json</a>, the same for programs</p>',
            '<p class="note">Keys are sent as <code>Authorization: Bearer KEY</code>, where the node has any.</p>',
            *_operations(spec["paths"]),
            '<h2 id="schemas">Schemas</h2>',
            *(_schema(name, schema) for name, schema in sorted(schemas.items())),
        ]
    )


def _operations(paths: _Json) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(_group(path), []).append(path)
    for group, members in groups.items():
        yield f"<h2>{escape(group)}</h2>"
        for path in members:
            yield from (_operation(method, path, paths[path][method]) for method in _METHODS if method in paths[path])


def _group(path: str) -> str:
    """The dialect, or part of the API, that a path belongs to."""
    starts = {"/v1/": "OpenAI's API", "/api/": "Ollama's API", "/models": "Models", "/admin/": "Administration"}
    return next((name for start, name in starts.items() if path.startswith(start)), "The node")


def _operation(method: str, path: str, operation: _Json) -> str:
    body = operation.get("requestBody", {}).get("content", {})
    parts = [
        f'<details><summary><span class="method">{method.upper()}</span> <code>{escape(path)}</code> '
        f"{escape(operation.get('summary', ''))}</summary>"
    ]
    if operation.get("security") == []:
        parts.append('<p class="note">Needs no key.</p>')
    if parameters := operation.get("parameters"):
        names = ", ".join(f"<code>{escape(item['name'])}</code> ({escape(item['in'])})" for item in parameters)
        parts.append(f"<p>Parameters: {names}</p>")
    parts += [f"<p>Body, {escape(kind)}: {_type(content['schema'])}</p>" for kind, content in body.items()]
    rows = "".join(
        f"<tr><td>{escape(status)}</td><td>{escape(answer['description'])}</td><td>{_contents(answer)}</td></tr>"
        for status, answer in operation["responses"].items()
    )
    return "".join([*parts, f"<table>{rows}</table></details>"])


def _contents(answer: _Json) -> str:
    return ", ".join(
        f"{escape(kind)} {_type(content['schema']) if content.get('schema') else ''}"
        for kind, content in answer.get("content", {}).items()
    )


def _schema(name: str, schema: _Json) -> str:
    required = set(schema.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{' *' if field in required else ''}</td><td>{_type(part)}</td>"
        f"<td>{_note(part)}</td></tr>"
        for field, part in schema.get("properties", {}).items()
    )
    about = f"<p>{escape(schema['description'])}</p>" if schema.get("description") else ""
    return f'<h3 id="{escape(name)}">{escape(name)}</h3>{about}' + (
        f"<table>{rows}</table>" if rows else f"<p>{_type({**schema, 'description': ''})}</p>"
    )


def _note(part: _Json) -> str:
    default = f" default {part['default']!r}" if part.get("default") is not None else ""
    return escape(f"{part.get('description', '')}{default}".strip())


def _type(schema: Any) -> str:
    """A type in words; a named one links to its schema."""
    if not isinstance(schema, Mapping):
        return "anything"
    if "$ref" in schema:
        name = escape(str(schema["$ref"]).rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            return " or ".join(dict.fromkeys(_type(part) for part in schema[word]))
    if values := schema.get("enum", [schema["const"]] if "const" in schema else None):
        return ", ".join(f"<code>{escape(str(value))}</code>" for value in values)
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"array of {_type(schema.get('items'))}"
    return escape(" or ".join(kind) if isinstance(kind, list) else str(kind))
