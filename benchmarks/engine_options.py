"""`python -m benchmarks.engine_options [drafts | kv]`: what options of the generation engine cost and gain on the CPU.

Each form runs in a process of its own, several times in turn, one answer after another, with the arithmetic that the
device chooses. Printed: tokens a second, CPU seconds a token, steps, and how many answers are those of the first form.
`drafts` compares draft models: one of the model's own 30 layers cut to a few (always wrong, so what a bad draft costs),
and a copy of the model (nearly always right, and as dear as the model, so what guessing costs at best).
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.cut_model import WRITER, cut
from worker_node.models.manifest import MANIFEST_FILE, MODEL_FILE, WEIGHTS_FILE
from worker_node.models.store import ModelStore

QUESTIONS = (
    "What is the capital of France?",
    "Tell me a short story about a cat and a boat.",
    "Explain why the sky is blue.",
    "List five animals and where they live.",
)
KV = {"default": {}} | {name: {"kv_cache_precision": name} for name in ("u8", "f16", "bf16")}
# One that grows ends the engine.
KV["u4"] = {"kv_cache_precision": "u4", "cache_size_gb": 1}
# As the node sets it beside a cache in f32.
KV["f32"] = {"kv_cache_precision": "f32", "plugin_config": {"INFERENCE_PRECISION_HINT": "f32"}}
BESIDE_A_DRAFT = {"enable_prefix_caching": False, "dynamic_split_fuse": False, "max_num_batched_tokens": 8192}


def drafts(root, path):
    """Options by the name of the form."""
    forms = {"without": BESIDE_A_DRAFT}
    for layers in (4, 20):
        directory = root / f"{layers} layers"
        left_out = (MANIFEST_FILE, MODEL_FILE, WEIGHTS_FILE)
        shutil.copytree(path, directory, ignore=lambda _directory, _names, files=left_out: files)
        cut(path / MODEL_FILE, directory / MODEL_FILE, layers_kept=layers)
        forms[directory.name] = BESIDE_A_DRAFT | {"draft_model": str(directory)}
    forms["a copy"] = BESIDE_A_DRAFT | {"draft_model": str(path)}
    return forms


def measure(path, options, limit):
    """One form in this process: loads it, answers once for warmth, and then each question."""
    import numpy as np

    from worker_node.core.types import Device, Message
    from worker_node.engines.protocol import EngineSpec
    from worker_node.tasks.generate.continuous import ContinuousRunner
    from worker_node.tasks.generate.messages import GenerateJob, Step
    from worker_node.tasks.generate.tokenization import ChatTokenizer

    runner = ContinuousRunner(EngineSpec("m", "generation", path, Device.CPU, "", options))
    runner.load()
    chat = ChatTokenizer(Path(path), 8192)

    def answer(question, limit):
        tokens = np.asarray(chat.encode_chat([Message("user", question)]), "<i4")
        runner.submit(GenerateJob(1, tokens.tobytes(), limit, 1e12, ignore_eos=True))
        made, steps = [], 0
        while runner.has_work:
            events = []
            runner.step(events.append, lambda: None)
            steps += 1
            made += [t for e in events if isinstance(e, Step) for delta in e.deltas for t in delta.tokens]
        return made, steps

    answer(QUESTIONS[0], 4)
    began, spent = time.perf_counter(), time.process_time()
    answers, steps = zip(*(answer(question, limit) for question in QUESTIONS), strict=True)
    count = sum(map(len, answers))
    wall, cpu = time.perf_counter() - began, time.process_time() - spent
    runner.close()
    print(json.dumps({"rate": count / wall, "cpu": cpu / count, "steps": sum(steps), "answers": answers}))


def compare(path, forms, rounds, tokens):
    found = {name: [] for name in forms}
    for _ in range(rounds):
        for name, options in forms.items():
            command = [
                sys.executable,
                "-m",
                "benchmarks.engine_options",
                "one",
                str(path),
                json.dumps(options),
                str(tokens),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    first = next(iter(found.values()))
    print(
        f"{'':12}{'tokens/s':>10}{'CPU ms/token':>14}{'CPU ÷ first':>13}{'steps':>7}  same answers, of {len(QUESTIONS)}"
    )
    for name, taken in found.items():
        rate, cpu = (statistics.median(each[key] for each in taken) for key in ("rate", "cpu"))
        ratio = statistics.median(a["cpu"] / b["cpu"] for a, b in zip(taken, first, strict=True))
        pairs = zip(taken[0]["answers"], first[0]["answers"], strict=True)
        same = sum(mine == theirs for mine, theirs in pairs)
        print(f"{name:12}{rate:10.1f}{cpu * 1e3:14.2f}{ratio:13.2f}{taken[0]['steps']:7}  {same}")


def main():
    if sys.argv[1:2] == ["one"]:
        measure(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_options", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="drafts, kv; both if none is given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    given = parser.parse_args()
    path = ModelStore().get(WRITER).path
    with tempfile.TemporaryDirectory() as root:
        chosen = {"drafts": lambda: drafts(Path(root), path), "kv": lambda: KV}
        for name in given.names or chosen:
            print(f"{name}: {WRITER}, {given.tokens} tokens, {given.rounds} rounds")
            compare(path, chosen[name](), given.rounds, given.tokens)


if __name__ == "__main__":
    main()
