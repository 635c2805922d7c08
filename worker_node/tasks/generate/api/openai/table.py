"""The fields of OpenAI's generation routes that this node does not implement, local servers' additions among them.

Sources: the API references of OpenAI, vLLM, llama.cpp's server and OpenRouter.
"""

from __future__ import annotations

from worker_node.api.leniency import Table, Unsupported, hints
from worker_node.api.openai.accounting import ACCOUNTING
from worker_node.tasks.generate.api.openai.guided import REFUSED

_SAMPLER = "this engine has no such sampling; leave it out, or use temperature, top_p, top_k, min_p and the penalties"
_TOKENS = "single tokens cannot be favoured or forbidden by this engine"
_SEARCH = "this node searches nothing; offer a tool that does"
_TEMPLATE = "the model's own template cannot be replaced; send a finished prompt to /v1/completions"
_INFILL = "text cannot be filled in before a suffix: the models here only continue a prompt"
_PROMPT_LOGPROBS = "the engine tells no reliable probabilities of the prompt's tokens"

# How long or in which manner a model thinks and writes: no model has to do as it is told.
STYLE = hints(
    "include_reasoning",
    "reasoning",
    "reasoning_budget",
    "reasoning_control",
    "reasoning_effort",
    "reasoning_format",
    "thinking",
    "thinking_token_budget",
    "verbosity",
)

_SAMPLING: Table = {
    "allowed_token_ids": Unsupported(_TOKENS),
    "bad_words": Unsupported(_TOKENS),
    "dry_multiplier": Unsupported(_SAMPLER),
    "dynatemp_range": Unsupported(_SAMPLER),
    "early_stopping": Unsupported("this engine has no beam search"),
    **REFUSED,
    "length_penalty": Unsupported("this engine has no beam search", (1,)),
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
    "return_tokens": Unsupported("tokens are returned as text; use /tokenize for their ids"),
    "return_token_ids": Unsupported("tokens are returned as text; use /tokenize for their ids"),
    "return_tokens_as_token_ids": Unsupported("tokens are returned as text; use /tokenize for their ids"),
    "t_max_predict_ms": Unsupported("send the header X-Request-Timeout-Ms, which counts from the request's arrival"),
    "tfs_z": Unsupported(_SAMPLER, (1,)),
    "top_a": Unsupported(_SAMPLER),
    "top_n_sigma": Unsupported(_SAMPLER, (-1,)),
    "typical_p": Unsupported(_SAMPLER, (1,)),
    "use_beam_search": Unsupported("this engine has no beam search; use n for several answers"),
    "xtc_probability": Unsupported(_SAMPLER),
    # Without what they belong to they do nothing.
    **hints(
        "dry_allowed_length",
        "dry_base",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "dynatemp_exponent",
        "min_keep",
        "mirostat_eta",
        "mirostat_tau",
        "post_sampling_probs",
        "samplers",
        "spaces_between_special_tokens",
        "xtc_threshold",
    ),
    "repeat_last_n": Unsupported("this engine's penalties count the whole answer", (-1, 64)),
}

CHAT: Table = {
    **ACCOUNTING,
    **STYLE,
    **_SAMPLING,
    **hints("prediction", "store"),
    "add_special_tokens": Unsupported("the chat template writes the special tokens"),
    "audio": Unsupported("the models here neither hear nor speak"),
    "chat_template": Unsupported(_TEMPLATE),
    "documents": Unsupported("the templates here take no documents; write them into a message"),
    "echo": Unsupported("a conversation is not sent back; use /v1/completions"),
    "function_call": Unsupported("this is the form before 2023-11; use tool_choice", ("auto", "none")),
    "functions": Unsupported("this is the form before 2023-11; use tools"),
    "plugins": Unsupported("this node has no plug-ins"),
    "web_search_options": Unsupported(_SEARCH),
}

COMPLETIONS: Table = {
    **ACCOUNTING,
    **STYLE,
    **_SAMPLING,
    **hints("store"),
    "add_special_tokens": Unsupported("send token ids for a prompt without special tokens", (True,)),
    "response_format": Unsupported("use /v1/chat/completions", ({"type": "text"},)),
    "suffix": Unsupported(_INFILL),
}

RESPONSES: Table = {
    **ACCOUNTING,
    **STYLE,
    **_SAMPLING,
    **hints("include", "stream_options"),
    # It bounds the calls of tools that a server runs, and there are none here.
    **hints("max_tool_calls"),
    "background": Unsupported("a response is made while the client waits"),
    "conversation": Unsupported("none are stored here; use previous_response_id, or send the earlier turns as input"),
    "prompt": Unsupported("no prompts are stored here"),
    "top_logprobs": Unsupported("use /v1/chat/completions"),
}

TOKENIZE: Table = {"chat_template": Unsupported(_TEMPLATE), "tools": Unsupported("send them with a request")}

MESSAGE: Table = {
    "audio": Unsupported("the models here neither hear nor speak"),
    "function_call": Unsupported("this is the form before 2023-11; use tool_calls"),
    **hints("annotations", "cache_breakpoint", "cache_control", "name", "reasoning", "reasoning_details"),
}

TABLES = (CHAT, COMPLETIONS, RESPONSES, MESSAGE, TOKENIZE)
