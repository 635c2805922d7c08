"""What a unit of `structured_output.cost` takes the runtime: schemas of many shapes, used in GenAI's own pipeline.

    python -m benchmarks.grammar_cost [MODEL]

Each schema gets a process of its own and fresh caches. CPU seconds, so that other work on the machine counts little.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from worker_node.core.errors import BadRequest
from worker_node.models.store import ModelStore
from worker_node.structured_output import cost as bounds
from worker_node.structured_output.scalars import FORMATS
from worker_node.structured_output.schema import compile_schema

_LIMIT_S = 60
_TOKENS = 24


def _fields(**parts: Any) -> dict[str, Any]:
    return {"type": "object", "properties": parts, "required": list(parts)}


def _pattern(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


def _texts(count: int, **more: Any) -> dict[str, Any]:
    return _fields(**{f"field{i}": {"type": "string", **{k: v(i) for k, v in more.items()}} for i in range(count)})


def shapes() -> dict[str, Any]:
    """Schemas by name, from everyday ones to those that were made to be dear."""
    found: dict[str, Any] = {
        "small": _fields(a={"type": "string"}, b={"type": "integer"}, c={"enum": ["x", "y"]}),
        "nested 20": True,
        "360 texts of 2000": _texts(360, maxLength=lambda _: 2000),
        "any of 30 lengths": {"anyOf": [{"type": "string", "maxLength": 40 + i} for i in range(30)]},
        "any of 300 lengths": {"anyOf": [{"type": "string", "maxLength": 40 + i} for i in range(300)]},
        "any of 50 formats": {"anyOf": [_fields(**{f"k{i}": {"format": "uri", "type": "string"}}) for i in range(50)]},
        "matrix": {"type": "array", "maxItems": 2000, "items": {"type": "array", "maxItems": 2000}},
        "list of texts": {"type": "array", "maxItems": 2000, "items": {"type": "string", "maxLength": 1999}},
        "any of 60 patterns": {"anyOf": [_pattern(f"^[^{chr(97 + i % 26)}]*{i}$") for i in range(60)]},
        "optional 300": {"type": "object", "properties": {f"f{i}": {"type": "integer"} for i in range(300)}},
        "integers": {"type": "array", "prefixItems": [{"type": "integer", "minimum": i} for i in range(200)]},
    }
    schema: Any = {"type": "string"}
    for level in range(20):
        schema = _fields(**{f"level{level}": schema, "text": {"type": "string"}})
    found["nested 20"] = schema
    tools = [_fields(name={"const": f"tool{i}"}, text={"type": "string", "maxLength": 2000}) for i in range(20)]
    found["20 tools"] = {"anyOf": tools}
    found["formats"] = _fields(**{name: {"type": "string", "format": name} for name in FORMATS})
    found["an email beside a pattern"] = _pattern(r"^[^@]+@([a-z-]+\.)+com$") | {"format": "email"}
    found["multiples"] = _fields(**{f"n{i}": {"type": "integer", "multipleOf": i} for i in (3, 7, 60, 63)})
    found["tails"] = _texts(15, maxLength=lambda i: 16 + i)
    found["optional texts"] = {
        "type": "object",
        "properties": {f"f{i}": {"type": "string", "maxLength": 500} for i in range(50)},
    }
    for level in (6, 14, 30):
        found[f"any of {level} lengths"] = {"anyOf": [{"type": "string", "maxLength": 40 + i} for i in range(level)]}
    for count in (10, 100, 1000, 1400):
        found[f"{count} texts"] = _texts(count)
    for count in (10, 40, 120, 360):
        found[f"{count} lengths"] = _texts(count, maxLength=lambda i: 1000 + i)
        found[f"{count} exact lengths"] = _texts(count, minLength=lambda i: 300 + i, maxLength=lambda i: 300 + i)
    for count in (100, 1000, 8000):
        found[f"enum {count}"] = {"enum": [f"value number {i}" for i in range(count)]}
    for pattern in (
        "^.{0,7}$", "^.{0,15}$", "^.{0,100}$", "^.{0,1000}$", "^.{1000}$", "^[a-z]{1,64}$", "^[a-z]{0,1000}$",
        "^(.{0,7}){0,7}$", "^(.{1,20}){1,20}$", "^([a-z]{1,20} ){20}$", "^(.|.|.|.|.|.|.|.)*$", "^.*.*.*.*.*.*.*.*$",
        "^" + ".?" * 50 + "$", "^" + ".*" * 50 + "$", "^" + "(.*x)*" * 10 + "$", "^" + ".{0,7}" * 20 + "$",
        "^" + "|".join(f"[a-z]{{0,20}}{i}" for i in range(50)) + "$", "^" + "|".join(f".*{i}" for i in range(50)) + "$",
        "^" + "|".join(f".{{1,{i + 2}}}{i}" for i in range(50)) + "$", "^(([a-z]+)+)+$", "^((a|b|ab)*c?d?)*x$",
        "^[\\w.+-]{1,64}@([a-z0-9-]{1,63}\\.){1,8}[a-z]{2,63}$",
    ):  # fmt: skip
        found[pattern[:40]] = _pattern(pattern)
    return found


def main(model: str = "smollm2-135m-instruct") -> None:
    """Print a line for each shape, and the dearest unit."""
    path = str(ModelStore().get(model).path)
    bound = bounds.MAX_COST
    bounds.MAX_COST = bounds.MAX_WIDTH = 10**12  # what is over the bound is measured too
    dearest = 0.0
    for name, schema in shapes().items():
        try:
            grammar = compile_schema(schema, "schema")
        except BadRequest as error:
            print(f"{name:40} refused: {error.message[:90]}", flush=True)
            continue
        estimate = bounds.grammar_cost(grammar)
        cost, width = estimate.compiling, estimate.width
        try:
            run = subprocess.run(
                [sys.executable, "-m", "benchmarks.grammar_cost", "--one", path],
                input=grammar, capture_output=True, text=True, timeout=_LIMIT_S, check=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            print(f"{name:40} cost {cost:8} width {width:4} NOT DONE in {_LIMIT_S} s", flush=True)
            continue
        first, token, megabytes = json.loads(run.stdout)
        dearest = max(dearest, first / cost)
        print(
            f"{name:40} cost {cost:8} width {width:4} compile {first:7.3f} s = {first / cost * 1e6:7.1f} us a unit, "
            f"token {token * 1e3:7.2f} ms, {megabytes:6.1f} MB",
            flush=True,
        )
    print(f"dearest unit: {dearest * 1e6:.1f} us; the bound is {bound} units")


def _one(path: str) -> None:
    from tests.support import held_text

    held_text.TOKENS = 49_000  # the tests make do with a cut vocabulary
    with tempfile.TemporaryDirectory() as scratch:
        held = held_text.HeldText(Path(path), Path(scratch))
    held.run('root ::= "a"\n', 0, 1)
    grammar = sys.stdin.read()
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    held.run(grammar, 0, 1)
    first = time.process_time() - began
    began = time.process_time()
    tokens = sum(held.run(grammar, seed, _TOKENS) for seed in range(3))
    token = (time.process_time() - began) / tokens
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps([first, token, grown / 1024]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _one(sys.argv[2])
    else:
        main(*sys.argv[1:])
