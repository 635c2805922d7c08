"""The limit to compare with: raw OpenVINO and openvino-genai pipelines, driven as well as we know how.

`python -m benchmarks.raw KIND MODEL_DIRECTORY` answers one JSON task a line on standard output.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path


def batches(rows, size):
    """Rows sorted by length, in padded batches."""
    import numpy as np

    rows = sorted(rows, key=len)
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        ids = np.zeros((len(batch), len(batch[-1])), np.int64)
        mask = np.zeros_like(ids)
        for i, row in enumerate(batch):
            ids[i, : len(row)] = row
            mask[i, : len(row)] = 1
        yield {"input_ids": ids, "attention_mask": mask}


def stream_counts(cores):
    """The numbers of streams that may be the best on so many cores: one over all, a core each, and between."""
    return sorted({1, min(2, cores), max(1, cores // 2), cores})


def text_tokenizer(directory):
    """The tokenizer of an embedding model, without truncation and padding."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class OneText:
    """An embedding model that has all cores for one text after another."""

    def __init__(self, directory):
        import openvino as ov

        self._tokenizer = text_tokenizer(directory)
        config = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}
        self._request = ov.Core().compile_model(directory / "openvino_model.xml", "CPU", config).create_infer_request()

    def vector(self, text):
        (inputs,) = batches([self._tokenizer.encode(text).ids], 1)
        self._request.infer(inputs)
        return self._request.get_tensor("embedding").data[0]


class Embedding:
    """AsyncInferQueue on the model, at the stream count and batch size that are best on the cores of this process."""

    SIZES = (1, 4, 8, 16, 32)

    def __init__(self, directory):
        import openvino as ov

        self._tokenizer = text_tokenizer(directory)
        core = ov.Core()
        self._queues = {}
        for streams in stream_counts(len(os.sched_getaffinity(0))):
            config = {"PERFORMANCE_HINT": "THROUGHPUT" if streams > 1 else "LATENCY", "NUM_STREAMS": str(streams)}
            compiled = core.compile_model(directory / "openvino_model.xml", "CPU", config)
            self._queues[streams] = ov.AsyncInferQueue(compiled, max(2, streams))
        self._alone = OneText(directory)
        self._best = None

    def about(self):
        return {"kind": "embedding"}

    def run(self, texts, tune=False, alone=False):
        if alone:
            return {"per_second": self._one_by_one(texts)}
        if tune:
            settings = [(streams, size) for streams in self._queues for size in self.SIZES]
            rates = {setting: max(self._rate(texts, *setting) for _ in range(2)) for setting in settings}
            self._best = max(rates, key=rates.get)
            return {"best": self._best, "rates": {f"{s}x{n}": round(rate, 1) for (s, n), rate in rates.items()}}
        return {"per_second": self._rate(texts, *self._best)}

    def _one_by_one(self, texts):
        began = time.perf_counter()
        for text in texts:
            self._alone.vector(text)
        return len(texts) / (time.perf_counter() - began)

    def _rate(self, texts, streams, size):
        queue = self._queues[streams]
        began = time.perf_counter()
        rows = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]
        for batch in batches(rows, size):
            queue.start_async(batch)
        queue.wait_all()
        return len(texts) / (time.perf_counter() - began)


class Continuous:
    """A ContinuousBatchingPipeline loop, for one caller too: LLMPipeline is no faster there (docs/performance.md)."""

    def __init__(self, directory):
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        self._pipeline = genai.ContinuousBatchingPipeline(str(directory), scheduler, "CPU", {})
        self._tokenizer = self._pipeline.get_tokenizer()
        self._id = 0

    def about(self):
        return {"kind": "continuous"}

    def run(self, prompts, tokens, callers):
        """A closed loop: `callers` requests are in the pipeline until no prompt is left."""
        import openvino_genai as genai

        config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True)
        waiting, running, firsts = iter(prompts), [], []
        produced = 0
        began = time.perf_counter()

        def send():
            prompt = next(waiting, None)
            if prompt is not None:
                self._id += 1
                ids = self._tokenizer.encode(prompt).input_ids
                sent = time.perf_counter()
                running.append([self._pipeline.add_request(self._id, ids, config), sent, 0])

        for _ in range(callers):
            send()
        while running:
            self._pipeline.step()
            for request in list(running):
                handle, sent, seen = request
                while handle.can_read():
                    request[2] += sum(len(out.generated_ids) for out in handle.read().values())
                if request[2] and not seen:
                    firsts.append(time.perf_counter() - sent)
                produced += request[2] - seen
                if request[2] >= tokens:
                    running.remove(request)
                    send()
        seconds = time.perf_counter() - began
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return {"per_second": produced / seconds, "first_token_s": statistics.median(firsts), "tokens": produced}


KINDS = {"embedding": Embedding, "continuous": Continuous}


def main(kind, directory):
    """Serve tasks until standard input ends."""
    pipeline = KINDS[kind](Path(directory))
    print(json.dumps(pipeline.about()), flush=True)
    for line in sys.stdin:
        print(json.dumps(pipeline.run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
