"""Writes the reference of the node's HTTP API from its /openapi.json: `make docs`."""

from pathlib import Path
from typing import Any

from worker_node.app import operations
from worker_node.http.routes import document

PAGE = Path(__file__).parent / "reference" / "http.md"
# The groups of routes in the order of the page: a title, and how their paths begin.
GROUPS = {
    "Native": ("/embeddings", "/inference", "/health", "/models", "/admin", "/metrics"),
    "OpenAI": ("/v1/chat", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/audio", "/v1/models"),
    "Ollama": ("/api/",),
    "Anthropic": ("/v1/messages",),
    "Reranking": ("/rerank", "/v1/rerank", "/v2/rerank"),
    "vLLM": ("/tokenize", "/detokenize"),
    "Pages": ("/dashboard", "/play", "/docs", "/openapi.json", "/favicon.ico", "/"),
}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
INTRODUCTION = """# HTTP reference

Generated from the node's `/openapi.json`: run `make docs`. A running node shows it with every reply at `/docs`.

    curl http://127.0.0.1:8081/openapi.json

Errors are `{"error": {"code", "message", "param"}}`; the dialects have their own forms. 429 and 503 carry
`Retry-After`. `/v3/` is answered as `/v1/`. Routes that compute something take these headers:
"""


def page() -> str:
    """The page as Markdown: headers, then the routes of each dialect, then the fields of each body."""
    described = document(operations())
    schemas = described["components"]["schemas"]
    routes = [(method, path, it) for path, methods in described["paths"].items() for method, it in methods.items()]
    parameters = [it for _, _, route in routes for it in route.get("parameters", [])]
    headers = {it["name"]: it["schema"] for it in parameters if it["in"] == "header"}
    parts = [INTRODUCTION, *(f"- `{name}`: {_takes(schema)}" for name, schema in headers.items())]
    for title in GROUPS:
        chosen = [route for route in routes if _group(route[1]) == title]
        parts += ["", f"## {title}", "", "| route | | body | without a key |", "|---|---|---|---|"]
        for method, path, route in chosen:
            body = _body(route)
            link = f"[{body}](#{body.lower()})" if body else ""
            without_key = "yes" if route.get("security") == [] else ""
            parts.append(f"| `{method.upper()} {path}` | {route['summary']} | {link} | {without_key} |")
    for body in dict.fromkeys(filter(None, (_body(route) for _, _, route in routes))):
        schema = schemas[body]
        parts += ["", f"## {body}", "", *([schema["description"], ""] if "description" in schema else [])]
        parts += ["| field | takes | default |", "|---|---|---|"]
        required = schema.get("required", [])
        for name, field in schema.get("properties", {}).items():
            default = "required" if name in required else _default(field)
            parts.append(f"| `{name}` | {_takes(field)} | {default} |")
    return "\n".join(parts) + "\n"


def _group(path: str) -> str:
    """The title whose longest beginning fits."""
    fitting = [(len(begin), title) for title, begins in GROUPS.items() for begin in begins if path.startswith(begin)]
    return max(fitting)[1]


def _body(route: dict[str, Any]) -> str:
    content = route.get("requestBody", {}).get("content", {})
    reference = next(iter(content.values()), {}).get("schema", {}).get("$ref", "")
    return reference.rpartition("/")[2]


def _default(field: dict[str, Any]) -> str:
    return f"`{str(field['default']).lower()}`" if field.get("default") not in {None, ""} else ""


def _takes(field: dict[str, Any]) -> str:
    """The values of a field in words: types, choices and bounds."""
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    if "anyOf" in field or "oneOf" in field:
        forms = [form for form in field.get("anyOf") or field["oneOf"] if form.get("type") != "null"]
        return ", or ".join(dict.fromkeys(map(_takes, forms)))
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "array":
        return f"list of {_takes(field.get('items', {}))}"
    bounds = [f"{sign} {field[key]}" for key, sign in BOUNDS.items() if key in field]
    return " ".join([str(field.get("type", "any JSON")), *bounds])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
