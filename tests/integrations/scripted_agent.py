"""A node whose chat model takes prompts of coding agents and answers by a script: one tool call, then a final text."""

import contextlib
import json
import shutil
from xml.etree import ElementTree

from tests.support.application import application, built_models, with_engine
from tests.support.writing import WRITER, WritingEngine
from worker_node.models.directory import MANIFEST_FILE
from worker_node.models.store import ModelStore

CONTEXT = 131_072
FINAL = "The command printed what was expected."


class AgentEngine(WritingEngine):
    """Calls `tool` until `output`, which its arguments do not contain, is in the prompt; then it writes FINAL.

    `rounds` counts both kinds of answers.
    """

    def __init__(self, tool, arguments, output):
        super().__init__()
        self.call = f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"
        self.output = output
        self.rounds = {"call": 0, "final": 0}

    async def generate(self, job):
        prompt = self.tokenizer.decode(memoryview(job.tokens).cast("i").tolist(), skip_special_tokens=False)
        answered = self.output in prompt
        self.rounds["final" if answered else "call"] += 1
        self.text = FINAL if answered else self.call
        async for delta in super().generate(job):
            yield delta


def long_context_store(store, root):
    """A store with the embedded chat model, whose tokenizer truncates at CONTEXT tokens instead of its own 8,192."""
    model = root / WRITER
    model.mkdir()
    for file in store.get(WRITER).path.iterdir():
        if file.name.startswith("openvino_model"):
            (model / file.name).symlink_to(file)
        else:
            shutil.copy(file, model)
    graph = ElementTree.parse(model / "openvino_tokenizer.xml")  # noqa: S314  (made by our own conversion)
    [truncation] = graph.findall(".//layer[@type='Minimum']")
    [edge] = graph.findall(f".//edge[@to-layer='{truncation.get('id')}'][@to-port='1']")
    offset = int(graph.find(f".//layer[@id='{edge.get('from-layer')}']/data").get("offset"))
    with (model / "openvino_tokenizer.bin").open("r+b") as weights:
        weights.seek(offset)
        weights.write(CONTEXT.to_bytes(4, "little"))
    manifest = json.loads((model / MANIFEST_FILE).read_bytes())
    manifest["context_limit"] = CONTEXT
    (model / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    return ModelStore(root)


@contextlib.asynccontextmanager
async def scripted_agent(store, engine):
    """Yields the URL of the node in front of `engine`."""
    [model] = [with_engine(model, engine) for model in built_models(store, WRITER)]
    engine.tokenizer = model.tokenizer
    async with application([model]) as (client, _):
        yield str(client.make_url("/")).rstrip("/")
