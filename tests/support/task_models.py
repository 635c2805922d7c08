"""Models of the newer tasks (reranking, speech, vision) around engines that a test chooses: tokenizers, preparation and
wire formats are real, nothing is computed. They need no files but those of the two models that come in packages."""

import base64
import io
from dataclasses import replace

import aiohttp
import numpy as np
from PIL import Image

from tests.support.speech import wav
from worker_node.core.types import Device
from worker_node.manager.placement import Placement
from worker_node.scheduling.admission import Admission, AdmissionLimits
from worker_node.serving.row_tokenizer import RowTokenizer
from worker_node.tasks.generate.building import GenerationModel, ImageRules
from worker_node.tasks.generate.chat_tokenizer import ChatTokenizer
from worker_node.tasks.rerank.service import RerankModel
from worker_node.tasks.transcribe.building import TranscriptionModel
from worker_node.tasks.transcribe.task import AudioOptions

RANKER, HEARER, SEER = "ranker", "hearer", "seer"


def ranker(store, placements, **more):
    installed = replace(store.get("all-minilm-l6-v2"), id=RANKER, kind="rerank", aliases=(), canary=None)
    return RerankModel(installed, RowTokenizer(installed.path, installed.context_limit), placements=placements, **more)


def hearer(store, placements, **more):
    installed = replace(store.get("all-minilm-l6-v2"), id=HEARER, kind="transcription", aliases=(), canary=None)
    return TranscriptionModel(installed, frozenset(), AudioOptions(), placements=placements, **more)


def seer(store, placements, **more):
    """A chat model that takes images, with SmolLM2's tokenizer; an image has four tokens."""
    installed = replace(store.get("smollm2-135m-instruct"), id=SEER, aliases=(), canary=None)
    chat = ChatTokenizer(installed.path, installed.context_limit)
    rules = ImageRules(lambda _width, _height: 4, 1_000_000, None, ("<image>",))
    return GenerationModel(installed, chat, placements=placements, images=rules, **more)


MODELS = {RANKER: ranker, HEARER: hearer, SEER: seer}


def placement(name, engine, suspects=None, **more):
    """One on the CPU that takes all prompts here."""
    if suspects is not None:
        more["suspects"] = suspects
    return Placement(Device.CPU, engine, Admission(name, AdmissionLimits(64, 8)), 8192, 8192, eager=True, **more)


def _image():
    target = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(target, "PNG")
    return "data:image/png;base64," + base64.b64encode(target.getvalue()).decode()


# Half a second of noise.
SPEECH, IMAGE = wav(np.random.default_rng(1).integers(-9000, 9000, 8000)), _image()


def request(name, text="dark", *, stream=False):
    if name == RANKER:
        return "/v2/rerank", {"json": {"model": RANKER, "query": text, "documents": ["a", "a longer document"]}}
    if name == HEARER:
        form = aiohttp.FormData(default_to_multipart=True)
        form.add_field("model", HEARER)
        form.add_field("prompt", text)
        form.add_field("file", SPEECH, filename="speech.wav")
        return "/v1/audio/transcriptions", {"data": form}
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": IMAGE}}]
    body = {"model": SEER, "messages": [{"role": "user", "content": parts}], "max_tokens": 200, "temperature": 0}
    return "/v1/chat/completions", {"json": body | ({"stream": True} if stream else {})}


def said(name, body):
    if name == RANKER:
        return [(result["index"], round(result["relevance_score"], 6)) for result in body["results"]]
    return body["text"] if name == HEARER else body["choices"][0]["message"]["content"]
