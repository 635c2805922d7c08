"""What a request says on sampling and the form of its answer.

A parameter means the same in every dialect because it is read here only. One that is absent or null is left open: the
model's own default counts, or Ollama's in its dialect (`OLLAMA_DEFAULTS`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from worker_node.core.errors import BadRequest
from worker_node.core.types import RequestContext
from worker_node.http.body import DialectBody, Table, Unsupported
from worker_node.structured_output.ebnf import one_text
from worker_node.structured_output.form import FormPart, GivenText
from worker_node.tasks.generate.messages import Sampling
from worker_node.tasks.generate.request import GenerationRequest, Message, TokenIds
from worker_node.tasks.generate.service import repeated

MAX_STOP_SEQUENCES = 16
MAX_STOP_CHARACTERS = 256
_SEEDS = 2**63
# Engines divide by the temperature in float32, which overflows below about 1e-37.
_LEAST_TEMPERATURE = 1e-6
# Engines want it above 0 in float32.
_LEAST_TOP_P = 1e-6
# Engines want it below 1 in float32, to which larger values are rounded.
_MOST_MIN_P = 1 - 1e-6

Length = Annotated[int, Field(ge=1, le=1_000_000)]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=1_000_000)]
ContextLength = Annotated[int, Field(ge=1, le=10_000_000)]
# Logits are divided by it: from here down, nothing but what was said before is left.
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=10)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class SamplingBody(DialectBody):
    """The parameters that OpenAI's and Ollama's bodies share: theirs, and what local servers add."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "max_new_tokens"),
)
# The field of `Sampling` that each parameter sets.
FIELDS: Mapping[str, str] = {name: name for name in _SAME} | {
    "stop_sequences": "stop",  # Anthropic
    "repeat_penalty": "repetition_penalty",  # llama.cpp, Ollama
    "max_tokens": "max_new_tokens",  # OpenAI, Anthropic
    "max_completion_tokens": "max_new_tokens",  # OpenAI
    "max_output_tokens": "max_new_tokens",  # OpenAI's Responses
    "n_predict": "max_new_tokens",  # llama.cpp
    "num_predict": "max_new_tokens",  # Ollama
}
# What counts in Ollama's dialect where the request leaves a parameter open; `prompting` says when a penalty does not.
OLLAMA_DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}


def sent_as(field: str, given: Mapping[str, Any]) -> str:
    """The parameter that set this field of `Sampling`; the field's own name where none did."""
    return next((name for name, one in FIELDS.items() if one == field and given.get(name) is not None), field)


def sampling(given: Mapping[str, Any], **more: Any) -> Sampling:
    """Return how to sample, from the fields of a body; `more` are fields that the dialect sets by itself.

    Raises BadRequest for a value out of range, and for two parameters that mean the same and differ.
    """
    fields: dict[str, Any] = {}
    for name, field in FIELDS.items():
        if given.get(name) is None:
            continue
        value = _value(field, name, given[name])
        if fields.setdefault(field, value) != value:
            raise BadRequest(f"{name} contradicts another parameter of the same meaning", param=name)
    if fields.get("top_p", 1) < _LEAST_TOP_P:
        # Nothing but the likeliest token is left, whatever the temperature.
        fields |= {"top_p": 1.0, "temperature": 0.0}
    # What the dialect sets by itself is as good as asked for.
    open_fields = tuple(name for name in Sampling.__struct_fields__ if name not in fields and name not in more)
    return Sampling(**fields, **more, open_fields=open_fields)


def _value(field: str, name: str, given: Any) -> Any:
    """The value of a field of `Sampling`, given by a parameter of that name."""
    value = given
    match field:
        case "temperature" if given < _LEAST_TEMPERATURE:
            value = 0.0
        case "top_k":
            # vLLM's and llama.cpp's -1 for all tokens is 0 here, as in Ollama.
            value = max(given, 0)
        case "min_p":
            value = min(given, _MOST_MIN_P)
        case "seed":
            # Ollama and llama.cpp: -1 is a seed of the node's choice; others are taken modulo the engine's range.
            value = None if given == -1 else given % _SEEDS
        case "stop":
            value = (given,) if isinstance(given, str) else tuple(given)
            if len(value) > MAX_STOP_SEQUENCES:
                raise BadRequest(f"{len(value)} stop sequences; at most {MAX_STOP_SEQUENCES} are taken", param=name)
            if not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in value):
                raise BadRequest(f"a stop sequence has 1 to {MAX_STOP_CHARACTERS} characters", param=name)
        case "stop_token_ids":
            value = tuple(given)
        case "max_new_tokens" if given <= 0:
            if name == "n_predict" and given == 0:
                raise BadRequest.at(name, "0 asks for no token; send 1 or more, or -1 for no limit")
            # Ollama: 0 and -1 no limit, -2 until the context is full; here the context is the limit in any case.
            value = None
    return value


# What the bodies of chat and completions share.

# Seconds, or a duration such as 5m.
KeepAlive = str | float

# What this node does not implement of the API references of OpenAI, vLLM, llama.cpp's server and OpenRouter.

_SAMPLER = "this engine has no such sampling; leave it out, or use temperature, top_p, top_k, min_p and the penalties"
_TOKENS = "single tokens cannot be favoured or forbidden by this engine"
_NO_LAZY = (
    "a grammar counts from the first token of the answer; offer tools, whose calls are enforced from where they begin"
)
_NO_GRAMMAR = "grammars are not enforced; send a JSON schema, a regular expression (guided_regex) or guided_choice"
_NO_TAGS = "tags of the caller's own cannot be enforced; offer tools, whose calls are"

SAMPLING: Table = {
    "allowed_token_ids": Unsupported(_TOKENS),
    "bad_words": Unsupported(_TOKENS),
    "dry_multiplier": Unsupported(_SAMPLER),
    "dynatemp_range": Unsupported(_SAMPLER),
    "early_stopping": Unsupported("a beam search ends when no better answer is likely"),
    "grammar": Unsupported(_NO_GRAMMAR),
    "grammar_lazy": Unsupported(_NO_LAZY),
    "grammar_triggers": Unsupported(_NO_LAZY),
    "guided_grammar": Unsupported(_NO_GRAMMAR),
    "include_stop_str_in_output": Unsupported("the answer ends before what ended it; add your stop string to it"),
    "logit_bias": Unsupported(_TOKENS),
    "logits_processors": Unsupported(_TOKENS),
    "lora": Unsupported("adapters are not loaded here; install the merged model"),
    "mirostat": Unsupported(_SAMPLER),
    "n_cmpl": Unsupported("use n", (1,)),
    "n_indent": Unsupported("lines are not indented by the engine; ask for it in the prompt"),
    "n_probs": Unsupported("use logprobs"),
    "prompt_embeds": Unsupported("a prompt is text or token ids"),
    "prompt_logprobs": Unsupported("the engine gives no reliable probabilities of the prompt's tokens"),
    "repeat_last_n": Unsupported("this engine's penalties count the whole answer", (-1, 64)),
    "repetition_detection": Unsupported("use the penalties, or stop"),
    "response_fields": Unsupported("replies have all of their fields"),
    "return_tokens": Unsupported("use return_token_ids"),
    "return_tokens_as_token_ids": Unsupported("use return_token_ids"),
    "t_max_predict_ms": Unsupported("send the header X-Request-Timeout-Ms, which counts from the request's arrival"),
    "tfs_z": Unsupported(_SAMPLER, (1,)),
    "top_a": Unsupported(_SAMPLER),
    "top_n_sigma": Unsupported(_SAMPLER, (-1,)),
    "truncate_prompt_tokens": Unsupported("prompts are not cut; send the part that counts", (-1,)),
    "typical_p": Unsupported(_SAMPLER, (1,)),
    "xtc_probability": Unsupported(_SAMPLER),
}


def _parsed(schema: Any) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return orjson.loads(schema)
    except orjson.JSONDecodeError:
        raise PydanticCustomError("not_a_schema", "the text is not a JSON schema") from None


# The runtime's grammars hold no control characters but those of white space.
_PLAIN = r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]*$"
_Choice = Annotated[str, Field(min_length=1, max_length=1000, pattern=_PLAIN)]
Choices = Annotated[list[_Choice], Field(min_length=1, max_length=256)]
Expression = Annotated[str, Field(min_length=1)]
Schema = Annotated[dict[str, Any], BeforeValidator(_parsed)]
Answer = FormPart | GivenText | str


class StructuredOutputs(DialectBody):
    """vLLM's newer name for the forms of an answer."""

    rules: ClassVar[Table] = {"structural_tag": Unsupported(_NO_TAGS), "grammar": Unsupported(_NO_GRAMMAR)}

    choice: Choices | None = None
    choices: Choices | None = None
    json_schema: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Expression | None = None


class StreamOptions(DialectBody):
    """What a stream holds besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(SamplingBody):
    """What the bodies of chat and completions share: OpenAI's fields, and what vLLM and llama.cpp add."""

    # In tokens, of an answer to a request that names no length.
    default_length: ClassVar[int | None] = None

    model: str
    max_tokens: Length | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    # What the schema takes; a model's own best_of_limit decides.
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_SEQUENCES)] | None = None
    return_token_ids: bool | None = None
    n_predict: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    repeat_penalty: RepetitionPenalty | None = None
    num_ctx: ContextLength | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    keep_alive: KeepAlive | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    guided_choice: Choices | None = None
    guided_json: Schema | None = None
    guided_regex: Expression | None = None
    json_schema: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None

    @cached_property
    def generations(self) -> int:
        """How many answers are generated for a prompt; of more than `n` the best are returned."""
        return (None if self.use_beam_search else self.best_of) or self.n or 1

    def requests_for(
        self,
        context: RequestContext,
        prompt: str | TokenIds | tuple[Message, ...],
        *,
        logprobs: bool,
        form: FormPart | None = None,
        **more: Any,
    ) -> list[GenerationRequest]:
        """One domain request for each generation; `form` is what a field of the route asks for. Raises BadRequest."""
        names = {"max_new_tokens": sent_as("max_new_tokens", vars(self))}
        if isinstance(prompt, tuple):
            names["prompt"] = "messages"
        if self.best_of:
            names["n"] = "best_of"
            if not logprobs:
                # The answers are ranked by their probabilities.
                names["logprobs"] = "best_of"
        request = GenerationRequest(
            # In vLLM's field, what is above 0 may wait.
            replace(context, interactive=False) if (self.priority or 0) > 0 else context,
            prompt,
            self._sampling(logprobs=logprobs),
            self.model,
            grammar=self._answer_form(form),
            context_limit=self.num_ctx,
            sent_as=names,
            **more,
        )
        return [request] if self.generations == 1 else repeated(request, self.generations)

    def _sampling(self, *, logprobs: bool) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise BadRequest.at("stream_options", "only with stream: true; leave it out, or stream")
        n, width, given = self.n or 1, self.best_of or self.n or 1, dict(vars(self))
        if sent_as("max_new_tokens", given) == "max_new_tokens":
            given["max_new_tokens"] = self.default_length
        if width < n:
            raise BadRequest.at("best_of", f"must be at least n, {n}, got {width}")
        if self.stream and (width > n or self.use_beam_search):
            raise BadRequest.at(
                "stream", "best_of and use_beam_search choose among whole answers; leave them out, or stream"
            )
        if self.stream and self.return_token_ids:
            raise BadRequest.at(
                "return_token_ids", "only whole replies have token ids; leave out return_token_ids or stream"
            )
        ids = bool(self.return_token_ids)
        if not self.use_beam_search:
            return sampling(given, logprobs=logprobs or width > n, token_ids=ids)
        if width == 1:
            raise BadRequest("use_beam_search: best_of must be the number of beams, at least 2", param="best_of")
        given["temperature"] = 0.0
        if not self.repeat_penalty:
            # GenAI takes no repetition penalty with it, so a model's own does not count either.
            given["repetition_penalty"] = self.repetition_penalty or 1
        more = {"beams": width, "length_penalty": 1.0 if self.length_penalty is None else self.length_penalty}
        return sampling(given, logprobs=logprobs, token_ids=ids, **more)

    def _answer_form(self, form: FormPart | None) -> Answer | None:
        more = self.structured_outputs or StructuredOutputs()
        forms: list[Answer] = [] if form is None else [form]
        for where, schema in (
            ("guided_json", self.guided_json),
            ("json_schema", self.json_schema),
            ("structured_outputs.json", more.json_schema),
            ("structured_outputs.json_object", {"type": "object"} if more.json_object else None),
        ):
            if schema is not None:
                forms.append(FormPart(schema, where, strict=False))
        choices = (self.guided_choice, more.choice, more.choices)
        forms += [f"root ::= {one_text(texts)}\n" for texts in choices if texts is not None]
        for where, source in (("guided_regex", self.guided_regex), ("structured_outputs.regex", more.regex)):
            if source is not None:
                forms.append(GivenText(source, where))
        if len(forms) > 1:
            names = ("guided_choice", "guided_json", "guided_regex", "json_schema", "response_format")
            sent = [name for name in (*names, "structured_outputs") if getattr(self, name, None) is not None]
            raise BadRequest(f"{', '.join(sent)}: the answer can have one form only; send one of them", param=sent[-1])
        return forms[0] if forms else None
