"""What a generation is asked for: a conversation, its tools and images, its prompt, and the form of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker_node.core.errors import NodeError
from worker_node.core.types import RequestContext
from worker_node.structured_output.form import FormPart, GivenText
from worker_node.tasks.generate.messages import Sampling


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt that is tokenized already, with the model's own tokenizer."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model made in an earlier turn."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Image:
    """An image within a message as it was sent: the base64 form of an image file, not decoded yet.

    `at` is its place in the message's text, in characters; `where` names the field of the request that holds it.
    """

    base64: str = field(repr=False)
    at: int
    where: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `role` is system, user, assistant or tool.

    A tool's message is its result; `tool_name` says whose it is, where that is known. `images` are in the order of
    their places in `content`.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_name: str | None = None
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may ask to be called; `parameters` is the JSON schema of its arguments.

    `path` is its place in the request. Where it is not `strict`, keywords that cannot be enforced are dropped.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    path: str = "tools"
    strict: bool = True


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request. With `forced` the answer is a call of one of them, and the engine is held to that.

    With `single` only the first call of an answer counts.
    """

    tools: tuple[Tool, ...]
    forced: bool = False
    single: bool = False


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a conversation becomes a prompt. `variables` are the caller's own for the model's chat template.

    `tools` are declared by the template; `think` turns reasoning on or off. The prompt ends where an answer begins,
    unless without `answer_prompt`; with `continue_last` it ends with the last message, which the answer continues.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    answer_prompt: bool = True
    continue_last: bool = False
    tools: Sequence[dict[str, Any]] | None = None
    think: bool | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt to continue. Text and token ids are continued as they stand; messages go through the chat template.

    `sampling.max_new_tokens` None means as many as the placement allows. The answer has the form of `grammar`: EBNF, or
    what EBNF is compiled from; with tools it may be calls instead, and is if one is forced.
    With `split_reasoning` the reasoning is separated from the answer. Prompt and answer together have at most
    `context_limit` tokens. With `drop_oldest` the oldest turns of a conversation that is too long are left out.
    `sent_as` says what the dialect calls the parts that errors name: `prompt`, `messages`, `max_new_tokens`, `n`,
    `response_format`. Its parts at the places in `ignored` have no effect.
    """

    context: RequestContext
    prompt: str | TokenIds | tuple[Message, ...]
    sampling: Sampling
    model: str | None = None
    tool_use: ToolUse | None = None
    grammar: str | FormPart | GivenText | None = None
    split_reasoning: bool = False
    context_limit: int | None = None
    rendering: Rendering = field(default_factory=Rendering)
    drop_oldest: bool = False
    sent_as: Mapping[str, str] = field(default_factory=dict, compare=False)
    ignored: Sequence[str] = ()

    def name_field(self, error: NodeError) -> None:
        if error.param:
            error.param = self.sent_as.get(error.param, error.param)
