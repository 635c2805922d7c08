"""The prompt of decoders that rank: Qwen3-Reranker's, as its model card has it.

The model reads a query and a document in this prompt, and its next token is "yes" or "no". What surrounds the query and
the document is written into the tokenizer of the model's directory, so that a pair is encoded as a cross-encoder's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from worker_node.core.errors import ConfigurationError, ConversionFailed
from worker_node.models.convert.tokenizer import TOKENIZER_FILE, write_tokenizer
from worker_node.tasks.rerank.tokenizer import PairTokenizer

PROMPT_FILE = "rerank_prompt.json"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
NO_AND_YES = ("no", "yes")
_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_MARKS = ("<|im_start|>", "<|im_end|>", *NO_AND_YES)


@dataclass(frozen=True, slots=True)
class RerankPrompt:
    """What a query and a document are ranked by."""

    instruction: str = INSTRUCTION

    def of_query(self, query: str) -> str:
        """The text up to the document. The newline belongs to it: a tokenizer may join it to a question mark."""
        return f"<Instruct>: {self.instruction}\n<Query>: {query}\n<Document>:"

    def of_document(self, document: str) -> str:
        """The text of the document."""
        return f" {document}"


def write_prompt(source: Path, target: Path) -> tuple[int, int]:
    """Write the tokenizer, completed by the prompt, and the prompt itself; returns the tokens of "no" and "yes".

    Raises ConversionFailed when the file is no tokenizer, or one without the prompt's tokens.
    """
    write_tokenizer(source / TOKENIZER_FILE, target / TOKENIZER_FILE)
    path = target / TOKENIZER_FILE
    tokenizer = Tokenizer.from_file(str(path))
    known = {mark: tokenizer.token_to_id(mark) for mark in _MARKS}
    if missing := [mark for mark, token in known.items() if token is None]:
        raise ConversionFailed(
            f"{source / TOKENIZER_FILE}: has no token {', '.join(missing)}, which Qwen3-Reranker's prompt is made of"
        )
    content: dict[str, Any] = json.loads(path.read_bytes())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [_fixed("begin", 0), {"Sequence": {"id": "A", "type_id": 0}}, _fixed("end", 0)],
        "pair": [
            _fixed("begin", 0),
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
            _fixed("end", 1),
        ],
        "special_tokens": {name: _tokens(tokenizer, name, text) for name, text in (("begin", _BEGIN), ("end", _END))},
    }
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    (target / PROMPT_FILE).write_bytes(msgspec.json.encode(RerankPrompt()))
    no, yes = (int(known[word] or 0) for word in NO_AND_YES)
    return no, yes


def read_prompt(directory: Path) -> RerankPrompt | None:
    """The prompt of a model; None for a cross-encoder. Raises ConfigurationError when the file is damaged."""
    path = directory / PROMPT_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=RerankPrompt)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"{path}: not readable ({error}); remove the model and convert it again") from error


def _fixed(name: str, type_id: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": name, "type_id": type_id}}


def _tokens(tokenizer: Tokenizer, name: str, text: str) -> dict[str, Any]:
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return {"id": name, "ids": encoding.ids, "tokens": encoding.tokens}


# Queries and documents in the prompt of a decoder that ranks.


class PromptedTokenizer(PairTokenizer):
    """As `PairTokenizer`, for a model with a prompt. What texts say of special tokens is text."""

    def __init__(self, directory: Path, limit: int, prompt: RerankPrompt) -> None:
        super().__init__(directory, limit)
        self._tokenizer.encode_special_tokens = True
        self._prompt = prompt

    def texts(self, query: str, documents: Sequence[str]) -> tuple[str, Sequence[str]]:
        """See `PairTokenizer.texts`; the prompt's tokens count as the query's."""
        return self._prompt.of_query(query), [self._prompt.of_document(document) for document in documents]
