"""What may be asked for: the fields of a request, by hand, since the contract knows one form of error and one status.

No message repeats what was sent.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

import orjson

from worker_node.core.errors import BadRequest
from worker_node.jobs.catalog import ALIASES, JOBS, MAX_INPUT_CHARACTERS, MAX_NEW_TOKENS, BoundedJob

# Control and format characters, as zero-width ones are, and marks that need a character before them.
_UNSEEN = frozenset({"Cc", "Cf", "Mn", "Me"})
_FIELDS = frozenset({"job", "input", "max_new_tokens"})


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job on a text, within its bounds; `repr` does not show the text."""

    job: BoundedJob
    text: str
    max_new_tokens: int

    def __repr__(self) -> str:
        return f"JobRequest({self.job.name}, {len(self.text)} characters, {self.max_new_tokens} tokens)"


def parse_request(data: bytes, implied: str | None = None) -> JobRequest:
    """Return the request that a body holds; `implied` is the job of the URL, where that says so. Raises BadRequest."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise BadRequest("the body is not valid JSON") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    if not body.keys() <= _FIELDS:
        raise BadRequest(f"unknown field in the body; known are {', '.join(sorted(_FIELDS))}")
    job = body.get("job", implied)
    if implied is not None and (not isinstance(job, str) or ALIASES.get(job, job) != implied):
        raise BadRequest(f"this URL is for the job {implied}")
    return make_request(job, body.get("input"), body.get("max_new_tokens"))


def make_request(job: object, text: object, max_new_tokens: object = None) -> JobRequest:
    """Return the request for a job of that name. Raises BadRequest."""
    known = ", ".join(sorted(JOBS))
    if not isinstance(job, str):
        raise BadRequest(f"job must be one of {known}")
    found = JOBS.get(ALIASES.get(job, job))
    if found is None:
        raise BadRequest(f"unknown job; known are {known}")
    return bounded(found, text, max_new_tokens)


def bounded(job: BoundedJob, text: object, max_new_tokens: object = None) -> JobRequest:
    """Return the request for a job. Raises BadRequest, naming the bound that a value is beyond."""
    if not isinstance(text, str):
        raise BadRequest("input must be a string")
    if not _shows_something(text[: MAX_INPUT_CHARACTERS + 1]):
        raise BadRequest("input must not be empty")
    if len(text) > MAX_INPUT_CHARACTERS:
        raise BadRequest(f"input has {len(text)} characters; at most {MAX_INPUT_CHARACTERS} are allowed")
    if max_new_tokens is None:
        max_new_tokens = job.default_max_new_tokens
    # A bool is an int to Python, and not to anyone who sends JSON.
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int):
        raise BadRequest("max_new_tokens must be an integer")
    if not 1 <= max_new_tokens <= MAX_NEW_TOKENS:
        raise BadRequest(f"max_new_tokens must be from 1 to {MAX_NEW_TOKENS}")
    return JobRequest(job, text, max_new_tokens)


def _shows_something(text: str) -> bool:
    """Whether a text has a character that can be seen: without one a model would make up an answer."""
    return any(not character.isspace() and unicodedata.category(character) not in _UNSEEN for character in text)
