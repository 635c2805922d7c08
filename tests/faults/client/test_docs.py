"""The recipes of docs/client.md: each is Python, and those that need nothing else run."""

import ast
import re
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.faults.scripted_node import ANSWER, ScriptedNode, vectors_for
from tests.faults.served import served_in_thread

DOC = (Path(__file__).parents[3] / "docs" / "client.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)


def block_with(text):
    [found] = [block for block in BLOCKS if text in block]
    return found


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0][:40])
def test_it_is_python(block):
    compile(block, "docs/client.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


async def test_the_aiohttp_recipe_serves(scripted, monkeypatch):
    monkeypatch.setenv("NPU_CLIENT_NODES", scripted.url)
    names = {"__name__": "recipe"}
    exec(compile(block_with("cleanup_ctx"), "docs/client.md", "exec"), names)  # noqa: S102
    async with TestClient(TestServer(names["app"])) as http:
        reply = await http.post("/embed", data="text")
        assert await reply.json() == vectors_for(["text"])[0].tolist()


def test_the_script_recipe_prints(capsys):
    with served_in_thread(ScriptedNode()) as url:
        script = block_with("Why is the sky blue?").replace("http://127.0.0.1:8081", url)
        exec(compile(script, "docs/client.md", "exec"), {"__name__": "recipe"})  # noqa: S102
    assert capsys.readouterr().out == "".join(ANSWER)
