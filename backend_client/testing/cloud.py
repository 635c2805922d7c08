"""A scripted cloud on loopback, in a thread of its own."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from backend_client.lifetime import LoopThread
from backend_client.testing.fleet import Recording, Served, application
from backend_client.testing.node import (
    SPACE,
    WORD,
    WRITER,
    Answer,
    Scripted,
    chat,
    fake_vector,
    json_answer,
    whole_chat,
)

# What the cloud calls its models.
CLOUD_WRITER, CLOUD_EMBEDDER = "fake-cloud-writer", "fake-cloud-embedder"


class FakeCloud(Scripted, Recording):
    """An OpenAI-compatible cloud: chats, whole and streamed, and embeddings. Use as `with`.

    `answer` is the text of all chats, or a function of the request's body. `usage` are the tokens of the prompt and of
    the answer that every reply reports; None reports none. `vector` makes the vector of a text, given its length.
    """

    paths = ("/v1/chat/completions", "/v1/embeddings")

    def __init__(self, *, dimensions: int = 8) -> None:
        self.requests = []
        super().__init__(self.requests.append)
        self.dimensions = dimensions
        self.answer: str | Callable[[Mapping[str, Any]], str] = "The capital is Paris."
        self.usage: tuple[int, int] | None = (13, 5)
        self.vector: Callable[[str, int], npt.ArrayLike] = fake_vector
        self._thread: LoopThread | None = None
        self._served: Served | None = None

    def settings(self, **values: Any) -> dict[str, Any]:
        """For `cloud` of the settings: it serves chats and embeddings of fake nodes, too."""
        return {
            "api_key": "sk-fake",
            "base_url": self.url,
            "chat_model": CLOUD_WRITER,
            "chat_models": {WRITER: CLOUD_WRITER},
            "embedding_models": {SPACE: CLOUD_EMBEDDER},
            **values,
        }

    def environment(self, **values: Any) -> dict[str, str]:
        """Variables that name this cloud as the fallback, for `monkeypatch.setenv` or a process."""
        return {"NPU_CLIENT_CLOUD": json.dumps(self.settings(**values))}

    def _reply(self, path: str, body: Mapping[str, Any]) -> Answer:
        usage = None
        if self.usage is not None:
            prompt, written = self.usage if path == "/v1/chat/completions" else (self.usage[0], 0)
            usage = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
        if path == "/v1/embeddings":
            return json_answer({"object": "list", "model": body["model"], "data": self._rows(body), "usage": usage})
        text = self.answer if isinstance(self.answer, str) else self.answer(body)
        if body.get("stream"):
            pieces: list[dict[str, Any]] = [{"content": piece} for piece in WORD.findall(text) or [text]]
            asked = (body.get("stream_options") or {}).get("include_usage")
            return chat(body["model"], pieces, "stop", usage if asked else None)
        return whole_chat(body["model"], {"content": text}, "stop", usage)

    def _rows(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        rows = np.array([self.vector(text, body.get("dimensions", self.dimensions)) for text in texts], "<f4")
        packed = body.get("encoding_format") == "base64"
        return [
            {"object": "embedding", "index": index, "embedding": _base64(row) if packed else row.tolist()}
            for index, row in enumerate(rows)
        ]

    def __enter__(self) -> Self:
        self._thread = LoopThread("fake cloud", self._stop)
        self._thread.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.close()

    async def _start(self) -> None:
        self._served = await Served.start(application(self))
        self.url = f"http://127.0.0.1:{self._served.port}/v1"

    async def _stop(self) -> None:
        if self._served is not None:
            await self._served.end()


def _base64(row: npt.NDArray[np.float32]) -> str:
    return base64.b64encode(row.tobytes()).decode()
