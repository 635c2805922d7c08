"""Fields that several of OpenAI's bodies share: sampling, the form of the answer, what is not implemented."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import Field
from pydantic_core import PydanticCustomError

from worker_node.core.errors import BadRequest
from worker_node.core.types import RequestContext
from worker_node.http.body import DialectBody, nested_deeper
from worker_node.http.leniency import Table, Unsupported
from worker_node.http.ollama import KeepAlive
from worker_node.structured_output.ebnf import one_text
from worker_node.tasks.generate.http import parameters
from worker_node.tasks.generate.http.parameters import MAX_STOP_SEQUENCES, RepetitionPenalty, SamplingBody
from worker_node.tasks.generate.messages import Sampling
from worker_node.tasks.generate.request import AnswerSchema, GivenForm, Rendering

_NO_LAZY = (
    "a grammar counts from the first token of the answer; offer tools, whose calls are enforced from where they begin"
)
_NO_GRAMMAR = "grammars are not enforced; send a JSON schema, a regular expression (guided_regex) or guided_choice"
_NO_TAGS = "tags of the caller's own cannot be enforced; offer tools, whose calls are"
_MAX_CHOICES = 256
_MAX_CHOICE = 1000

# The runtime's grammars hold no control characters but those of white space.
_PLAIN = r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]*$"
Choice = Annotated[str, Field(min_length=1, max_length=_MAX_CHOICE, pattern=_PLAIN)]
Choices = Annotated[list[Choice], Field(min_length=1)]
Schema = dict[str, Any] | str
Answer = AnswerSchema | GivenForm | str

REFUSED: Table = {
    "grammar_triggers": Unsupported(_NO_LAZY),
    "grammar_lazy": Unsupported(_NO_LAZY),
    "guided_grammar": Unsupported(_NO_GRAMMAR),
    "grammar": Unsupported(_NO_GRAMMAR),
    "truncate_prompt_tokens": Unsupported("prompts are not cut; send the part that counts", neutral=(-1,)),
}


class StructuredOutputs(DialectBody):
    """vLLM's newer name for the forms of an answer."""

    rules: ClassVar[Table] = {
        "structural_tag": Unsupported(_NO_TAGS),
        "grammar": Unsupported(_NO_GRAMMAR),
    }

    choice: Annotated[Choices, Field(max_length=_MAX_CHOICES)] | None = None
    choices: Annotated[Choices, Field(max_length=_MAX_CHOICES)] | None = None
    json_schema: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None


class GuidedFields(DialectBody):
    """What vLLM's and llama.cpp's servers take beside, or in place of, `response_format`."""

    guided_choice: Annotated[Choices, Field(max_length=_MAX_CHOICES)] | None = None
    guided_json: Schema | None = None
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    json_schema: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None

    def held_to(self, wanted: AnswerSchema | None) -> Answer | None:
        """The form of the answer, or None; `wanted` is what another field asks for.

        Raises BadRequest for more than one.
        """
        more = self.structured_outputs or StructuredOutputs()
        found = [wanted] if wanted is not None else []
        forms: list[tuple[str, Any]] = [
            ("guided_json", self.guided_json),
            ("json_schema", self.json_schema),
            ("structured_outputs.json", more.json_schema),
        ]
        schemas = [_schema(value, where) for where, value in forms if value is not None]
        if more.json_object:
            schemas.append(AnswerSchema({"type": "object"}, "structured_outputs.json_object"))
        choices = [_choice(one) for one in (self.guided_choice, more.choice, more.choices) if one is not None]
        texts = [
            GivenForm(source, where)
            for where, source in (("guided_regex", self.guided_regex), ("structured_outputs.regex", more.regex))
            if source is not None
        ]
        everything: list[Answer] = [*found, *schemas, *choices, *texts]
        if len(everything) > 1:
            names = sorted({"response_format", *GuidedFields.model_fields})
            sent = ", ".join(name for name in names if getattr(self, name, None) is not None)
            raise BadRequest(
                f"{sent}: the answer can have one form only; send one of them", param=sent.rpartition(" ")[2]
            )
        return everything[0] if everything else None


def _schema(given: Schema, where: str) -> AnswerSchema:
    if isinstance(given, str):
        try:
            given = orjson.loads(given)
        except orjson.JSONDecodeError:
            given = None  # type: ignore[assignment]
        if not isinstance(given, dict):
            raise BadRequest(f"{where}: the text is not a JSON schema", param=where)
    return AnswerSchema(given, where, strict=False)


def _choice(texts: list[str]) -> str:
    """The grammar of exactly one of the texts."""
    return f"root ::= {one_text(texts)}\n"


# Fields that several of OpenAI's bodies share.

# What the schema takes; a model's own best_of_limit decides.
MAX_CHOICES = 128

NumberOf = Annotated[int, Field(ge=1, le=1_000_000)]


class StreamOptions(DialectBody):
    """What a stream holds besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(GuidedFields, SamplingBody):
    """Sampling parameters of OpenAI, and what local servers add: top_k, min_p, repetition_penalty, ignore_eos."""

    model: str
    max_tokens: NumberOf | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_SEQUENCES)] | None = None
    return_token_ids: bool | None = None
    n_predict: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    repeat_penalty: RepetitionPenalty | None = None
    num_ctx: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    keep_alive: KeepAlive | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def urgency(self, context: RequestContext) -> RequestContext:
        """The context with the priority of vLLM's field: what is above 0 may wait and is batch work."""
        return context if (self.priority or 0) <= 0 else replace(context, interactive=False)

    def sampling(self, *, logprobs: bool, **override: Any) -> Sampling:
        """How to sample, with some fields overridden. Raises BadRequest."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options: only with stream: true; leave it out, or stream", param="stream_options")
        n, width, given = self.n or 1, self.best_of or self.n or 1, vars(self) | override
        if width < n:
            raise BadRequest(f"best_of: must be at least n, {n}, got {width}", param="best_of")
        if self.stream and (width > n or self.use_beam_search):
            raise BadRequest(
                "stream: best_of and use_beam_search choose among whole answers; leave them out, or stream",
                param="stream",
            )
        if self.stream and self.return_token_ids:
            raise BadRequest(
                "return_token_ids: only whole replies have token ids; leave out return_token_ids or stream",
                param="return_token_ids",
            )
        ids = bool(self.return_token_ids)
        if not self.use_beam_search:
            return parameters.sampling(parameters.OPENAI, given, logprobs=logprobs or width > n, token_ids=ids)
        if width == 1:
            raise BadRequest("use_beam_search: best_of must be the number of beams, at least 2", param="best_of")
        # GenAI takes no repetition penalty with it, so a model's own does not count either.
        given |= {"temperature": 0.0} | (
            {} if self.repeat_penalty else {"repetition_penalty": self.repetition_penalty or 1}
        )
        more = {"beams": width, "length_penalty": 1.0 if self.length_penalty is None else self.length_penalty}
        return parameters.sampling(parameters.OPENAI, given, logprobs=logprobs, token_ids=ids, **more)

    @property
    def names(self) -> dict[str, str]:
        """What the request calls the parts of a `GenerationRequest` that errors name."""
        names = {"max_new_tokens": parameters.sent_as("max_new_tokens", parameters.OPENAI, vars(self))}
        if self.best_of:
            names["n"] = "best_of"
            if vars(self).get("logprobs") is None:
                # The answers are ranked by their probabilities.
                names["logprobs"] = "best_of"
        return names

    @property
    def generations(self) -> int:
        """How many generations answer a prompt; more than `n` are ranked, and the `n` best returned."""
        return (None if self.use_beam_search else self.best_of) or self.n or 1


# Kinds of content and tools that OpenAI's API has and this node does not: refused with the reason, not as mistakes.

_IMAGES = frozenset({"image_url", "input_image"})
_MEDIA = {
    "input_audio": "sound",
    "audio_url": "sound",
    "video_url": "films",
    "input_video": "films",
    "file": "files",
    "input_file": "files",
}


def only_text(part: Any) -> Any:
    """The part of a message that may hold text only, as it was sent. Raises PydanticCustomError."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _IMAGES:
        reason = "{kind}: images are read in messages of the user only"
        raise PydanticCustomError("unsupported_part", reason, {"kind": kind})
    return text_or_image(part)


def text_or_image(part: Any) -> Any:
    """The part of a message as it was sent. Raises PydanticCustomError for one that no model here reads."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _MEDIA:
        reason = "{kind}: {media} are not supported; the models here read text and images"
        raise PydanticCustomError("unsupported_part", reason, {"kind": kind, "media": _MEDIA[kind]})
    return part


# The fields of OpenAI's generation routes that this node does not implement, local servers' additions among them.
#
# Sources: the API references of OpenAI, vLLM, llama.cpp's server and OpenRouter.

_SAMPLER = "this engine has no such sampling; leave it out, or use temperature, top_p, top_k, min_p and the penalties"
_TOKENS = "single tokens cannot be favoured or forbidden by this engine"
_SEARCH = "this node searches nothing; offer a tool that does"
_TEMPLATE = "the model's own template cannot be replaced; send a finished prompt to /v1/completions"
EARLIER = "nothing is stored here; send the conversation so far in `input`"
_INFILL = "text cannot be filled in before a suffix: the models here only continue a prompt"
_PROMPT_LOGPROBS = "the engine gives no reliable probabilities of the prompt's tokens"

_SAMPLING: Table = {
    "allowed_token_ids": Unsupported(_TOKENS),
    "bad_words": Unsupported(_TOKENS),
    "dry_multiplier": Unsupported(_SAMPLER),
    "dynatemp_range": Unsupported(_SAMPLER),
    "early_stopping": Unsupported("a beam search ends when no better answer is likely"),
    **REFUSED,
    "include_stop_str_in_output": Unsupported("the answer ends before what ended it; add your stop string to it"),
    "logit_bias": Unsupported(_TOKENS),
    "logits_processors": Unsupported(_TOKENS),
    "lora": Unsupported("adapters are not loaded here; install the merged model"),
    "mirostat": Unsupported(_SAMPLER),
    "n_cmpl": Unsupported("use n", (1,)),
    "n_indent": Unsupported("lines are not indented by the engine; ask for it in the prompt"),
    "n_probs": Unsupported("use logprobs"),
    "prompt_embeds": Unsupported("a prompt is text or token ids"),
    "prompt_logprobs": Unsupported(_PROMPT_LOGPROBS),
    "repetition_detection": Unsupported("use the penalties, or stop"),
    "response_fields": Unsupported("replies have all of their fields"),
    "return_tokens": Unsupported("use return_token_ids"),
    "return_tokens_as_token_ids": Unsupported("use return_token_ids"),
    "t_max_predict_ms": Unsupported("send the header X-Request-Timeout-Ms, which counts from the request's arrival"),
    "tfs_z": Unsupported(_SAMPLER, (1,)),
    "top_a": Unsupported(_SAMPLER),
    "top_n_sigma": Unsupported(_SAMPLER, (-1,)),
    "typical_p": Unsupported(_SAMPLER, (1,)),
    "xtc_probability": Unsupported(_SAMPLER),
    "repeat_last_n": Unsupported("this engine's penalties count the whole answer", (-1, 64)),
}

CHAT: Table = {
    **_SAMPLING,
    "add_special_tokens": Unsupported("the chat template writes the special tokens"),
    "audio": Unsupported("audio is not supported"),
    "chat_template": Unsupported(_TEMPLATE),
    "documents": Unsupported("the templates here take no documents; write them into a message"),
    "echo": Unsupported("a conversation is not sent back"),
    "function_call": Unsupported("this is the form before 2023-11; use tool_choice", ("auto", "none")),
    "functions": Unsupported("this is the form before 2023-11; use tools"),
    "plugins": Unsupported("this node has no plug-ins"),
    "web_search_options": Unsupported(_SEARCH),
}

COMPLETIONS: Table = {
    **_SAMPLING,
    "add_special_tokens": Unsupported("send token ids for a prompt without special tokens", (True,)),
    "echo": Unsupported("a prompt is not sent back; put it before the text"),
    "response_format": Unsupported("use /v1/chat/completions", ({"type": "text"},)),
    "suffix": Unsupported(_INFILL),
}

RESPONSES: Table = {
    **_SAMPLING,
    "background": Unsupported("a response is made while the client waits"),
    "conversation": Unsupported(EARLIER),
    "previous_response_id": Unsupported(EARLIER),
    "prompt": Unsupported("no prompts are stored here"),
    "top_logprobs": Unsupported("use /v1/chat/completions"),
    "use_beam_search": Unsupported("use /v1/chat/completions"),
}

TOKENIZE: Table = {"chat_template": Unsupported(_TEMPLATE), "tools": Unsupported("send them with a request")}

MESSAGE: Table = {
    "audio": Unsupported("audio is not supported"),
    "function_call": Unsupported("this is the form before 2023-11; use tool_calls"),
}


# vLLM's parameters of a conversation's rendering: the template's own variables, and where the prompt ends.

_MAX_BYTES = 8192
_MAX_NESTING = 5
# What the node itself hands to the template.
_RESERVED = frozenset({"add_generation_prompt", "bos_token", "chat_template", "eos_token", "messages", "tools"})


def rendering(
    variables: Mapping[str, Any] | None, *, add_generation_prompt: bool | None, continue_final_message: bool | None
) -> Rendering:
    """How the conversation is rendered. Raises BadRequest."""
    if continue_final_message and add_generation_prompt:
        raise BadRequest(
            "continue_final_message: the prompt ends either with the last message or where a new one begins; leave "
            "add_generation_prompt out",
            param="continue_final_message",
        )
    return Rendering(
        _checked(variables or {}),
        answer_prompt=add_generation_prompt is not False,
        continue_last=bool(continue_final_message),
    )


def _checked(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    taken = sorted(_RESERVED & variables.keys())
    if taken:
        raise BadRequest(f"chat_template_kwargs: {taken[0]} is set by the node", param="chat_template_kwargs")
    if nested_deeper(variables, _MAX_NESTING) or len(orjson.dumps(variables)) > _MAX_BYTES:
        raise BadRequest(
            f"chat_template_kwargs: at most {_MAX_BYTES} bytes of JSON, nested at most {_MAX_NESTING} levels deep",
            param="chat_template_kwargs",
        )
    return variables
