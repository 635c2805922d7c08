"""Renders conversations in a model's own chat template, with GenAI's renderer."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import openvino_genai as genai

# Where GenAI looks for special tokens.
_CONFIGURATION = ("config.json", "special_tokens_map.json", "tokenizer_config.json")
_NAMES = ("bos", "eos", "pad")


class TemplateRenderer:
    """GenAI's tokenizer without the graphs, which take it half a second to compile with the GIL held.

    `ids` are the special tokens that the tokenizer's graph names, as `eos_token_id`; `decode` is the text of a token.
    """

    def __init__(self, directory: Path, template: str, ids: Mapping[str, int], decode: Callable[[int], str]) -> None:
        with tempfile.TemporaryDirectory() as without_graphs:
            for name in _CONFIGURATION:
                if (directory / name).is_file():
                    shutil.copyfile(directory / name, Path(without_graphs) / name)
            self._tokenizer = genai.Tokenizer(without_graphs)
        if template:
            self._tokenizer.set_chat_template(template)
        self.special_ids: dict[str, int] = {}
        self._variables: dict[str, str] = {}
        for name in _NAMES:
            known = getattr(self._tokenizer, f"get_{name}_token_id")()
            self.special_ids[name] = token = int(ids.get(f"{name}_token_id", known))
            text = str(getattr(self._tokenizer, f"get_{name}_token")())
            self._variables[f"{name}_token"] = text or (decode(token) if token >= 0 else "")

    @property
    def template(self) -> str:
        """The template in Jinja; empty where there is none."""
        return str(self._tokenizer.chat_template)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        answer_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text. Raises RuntimeError if the template does not take it."""
        return str(
            self._tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=answer_prompt,
                tools=tools,
                extra_context=self._variables | dict(variables or {}),
            )
        )
