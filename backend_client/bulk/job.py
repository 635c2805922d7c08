"""What a job is: everything that its output depends on. Stored once as `_job.json`; a run that differs is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any, Literal

from backend_client.bulk.inputs import Fragment, InputFile
from backend_client.bulk.stores import need
from backend_client.errors import ConfigurationError
from backend_client.options import LONGEST_S
from backend_client.results import Device

FORMAT = 1
"""The version of the layout of an output directory."""

Kind = Literal["embed", "generate"]
RESULT_TYPES = {
    "num_input_tokens": "int64",
    "num_generated_tokens": "int64",
    "npu_busy_us": "int64",
    "joules": "float64",
    "finish_reason": "string",
    "model": "string",
    "node": "string",
    "device": "string",
    "space": "string",
    "error": "string",
    "emulated": "bool_",
}
"""Arrow's types of the columns of every output that say who answered, and how."""
RESULT_COLUMNS = (*RESULT_TYPES, "source_file", "source_row")
"""The columns of every output beside the input's own and the result itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkJob:
    """What the output depends on. `column` holds the texts, prompts or messages.

    `space` and `dimensions` are "" and 0 for generation. `options`: `truncate`, or the sampling. `schema`: Arrow's, in
    base64, of the input's columns in the output; `json_types`: the types of their values in JSON lines.
    """

    kind: Kind
    source: str
    column: str
    messages: bool = False
    id_column: str | None = None
    keep: tuple[str, ...] | None = None
    rows_per_fragment: int
    model: str
    space: str = ""
    dimensions: int = 0
    require_device: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    schema: str = ""
    json_types: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def result_column(self) -> str:
        """The column of the result, named as in ray.data.llm."""
        return "embeddings" if self.kind == "embed" else "generated_text"

    def dump(self, fragments: Sequence[Fragment]) -> bytes:
        """As JSON, with the files of the input and the fragments: file number, range, rows, problem."""
        files = list(dict.fromkeys(fragment.file for fragment in fragments))
        numbers = {file: number for number, file in enumerate(files)}
        parts = [[numbers[part.file], part.start, part.stop, part.rows, part.problem] for part in fragments]
        plan = {"files": [astuple(file) for file in files], "fragments": parts}
        return json.dumps(asdict(self) | plan).encode() + b"\n"

    def problem(self, value: Any) -> str:
        """Why a value of `column` cannot be sent; "" when it can."""
        try:
            if self.messages:
                json.dumps(conversation(value), ensure_ascii=False).encode()
            else:
                _text(value).encode()
        except (UnicodeEncodeError, TypeError):
            if self.messages:
                return "the messages hold a lone surrogate, or what is not JSON"
            return "a lone surrogate, which is not valid Unicode"
        except ValueError as error:
            return str(error)
        return ""

    def differences(self, other: BulkJob) -> list[str]:
        """Each field in which another job differs."""
        found = []
        for item in fields(self):
            stored, now = getattr(self, item.name), getattr(other, item.name)
            if stored != now:
                shown = (json.dumps(value, ensure_ascii=False) for value in (stored, now))
                before, after = (text if len(text) <= 80 else f"{text[:77]}..." for text in shown)
                found.append(f"{item.name}: {before} in _job.json, {after} now")
        return found


def load_job(data: bytes, where: str) -> tuple[BulkJob, list[Fragment]]:
    """Read `BulkJob.dump`. Raises ConfigurationError for anything else."""
    try:
        values = json.loads(data)
        if values["format"] == FORMAT:
            files = [InputFile(*file) for file in values.pop("files")]
            fragments = [Fragment(files[number], *rest) for number, *rest in values.pop("fragments")]
            values["keep"] = None if values["keep"] is None else tuple(values["keep"])
            return BulkJob(**values), fragments
    except (ValueError, TypeError, KeyError):
        pass
    raise ConfigurationError(
        f"{where} is not a job of this version (format {FORMAT}): choose another output, or continue with the "
        "version that began it"
    )


def _text(value: Any) -> str:
    if value is None:
        raise ValueError("null")
    if isinstance(value, bytes):
        raise ValueError("invalid UTF-8")
    if not isinstance(value, str):
        raise ValueError(f"not text, but {type(value).__name__}")
    return value


def conversation(value: Any) -> list[dict[str, Any]]:
    """The messages of a row: a list of objects, or its JSON. Raises ValueError with the reason."""
    if not isinstance(value, list):
        try:
            value = json.loads(_text(value))
        except (json.JSONDecodeError, RecursionError):
            value = None
    if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
        raise ValueError("not a list of messages")
    # Arrow gives every struct all fields of its type: what a message does not have is null.
    return [{name: part for name, part in item.items() if part is not None} for item in value]


# What the caller of a job asks for.

ROWS_PER_FRAGMENT = {"embed": 50_000, "generate": 200}
"""Two to three minutes of work: at 300 texts a second, and at 1.5 answers a second."""

_POSITIVE = ("window", "attempts", "rows_per_fragment", "concurrency", "timeout")
_OPTIONS = {
    "embed": frozenset({"truncate"}),
    "generate": frozenset({"max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "response_schema"}),
}
# What every node takes: with another value each row would be rejected.
_BOUNDS = {"max_tokens": (1, math.inf), "temperature": (0, 2), "top_p": (0, 1), "top_k": (-1, math.inf)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkRequest:
    """A job, and how this run of it is to work.

    `source` is a path or URL, a directory or a glob; `out` a directory or prefix. `column` holds the texts, prompts or
    conversations (`messages`). `keep`: the input's columns that the output has; None: all. `options` are those of each
    call: `truncate`; `max_tokens`, `temperature`, `top_p`, `top_k`, `seed`, `stop`, `response_schema`.

    The rest may differ from run to run. `shard` is (i, n), i counted from 0. `window`: fragments under way at once.
    `concurrency`: requests under way at once, by default 3 batches, or 8 prompts, for every node. `attempts`: how often
    a fragment, or a request while others are answered, may fail before the fragment is quarantined. `max_rejected`: the
    share of rows that may be rejected. `patience`: seconds to wait for a fleet that serves nothing. `timeout`: seconds
    of one request with its retries.
    """

    kind: Kind
    source: str
    out: str
    column: str
    messages: bool = False
    id_column: str | None = None
    keep: tuple[str, ...] | None = None
    model: str | None = None
    require_device: Device | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    rows_per_fragment: int | None = None
    shard: tuple[int, int] | None = None
    window: int = 2
    concurrency: int | None = None
    attempts: int = 3
    max_rejected: float = 0.001
    patience: float = 600.0
    timeout: float | None = None
    allow_cloud: bool = False

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in _POSITIVE}
        wrong = [f"{name} must be more than 0" for name, value in given.items() if value is not None and not value > 0]
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            wrong.append(f"shard {self.shard[0]}/{self.shard[1]} does not exist: shards are 0/n to n-1/n")
        if self.timeout is not None and not self.timeout <= LONGEST_S:
            wrong.append(f"timeout must be at most {LONGEST_S:.0f} seconds, got {self.timeout}")
        if not self.patience >= 0:
            wrong.append("patience must be a number of seconds, 0 or more")
        if not 0 <= self.max_rejected <= 1:
            wrong.append("max_rejected must be a share of the rows, from 0 to 1")
        if unknown := sorted(self.options.keys() - _OPTIONS[self.kind]):
            wrong.append(f"options of {self.kind} must be {', '.join(sorted(_OPTIONS[self.kind]))}, got {unknown[0]}")
        for name, (least, most) in _BOUNDS.items():
            value = self.options.get(name)
            if value is not None and not least <= value <= most:
                bounds = f"at least {least}" if math.isinf(most) else f"from {least} to {most}"
                wrong.append(f"{name} must be {bounds}, got {value}")
        taken = [name for name in self.keep or () if name in {*RESULT_COLUMNS, "embeddings", "generated_text"}]
        if taken:
            wrong.append(f"the output adds a column {taken[0]}: it cannot be kept from the input")
        if self.keep is not None and len({*self.keep}) != len(self.keep):
            # Readers of Parquet refuse a file with two columns of one name.
            wrong.append(f"each kept column must be named once, got {','.join(self.keep)[:200]}")
        if wrong:
            raise ConfigurationError("; ".join(wrong))
        if "response_schema" in self.options:
            schema_validator(self.options["response_schema"])

    def job(self, *, model: str, space: str, dimensions: int) -> BulkJob:
        """The job that this asks for, without what only the input tells."""
        asked = {item.name: getattr(self, item.name) for item in fields(BulkJob) if hasattr(self, item.name)}
        asked |= {"options": dict(self.options), "model": model, "space": space, "dimensions": dimensions}
        asked["rows_per_fragment"] = self.rows_per_fragment or ROWS_PER_FRAGMENT[self.kind]
        return BulkJob(**asked)


def schema_validator(schema: Any) -> Any:
    """What checks values against a schema. Raises ConfigurationError for one that is wrong or incomplete."""

    def retrieve_nothing(_: str) -> Any:
        raise ValueError("a schema must be complete in itself")

    try:
        return need("jsonschema_rs").validator_for(schema, retriever=retrieve_nothing)
    except ValueError as error:
        problem = str(error).partition("\n")[0]
    raise ConfigurationError(f"response_schema is not a valid JSON Schema: {problem}")


# Rows of a fragment: chunks as they are read, and rows that are rejected.

CHUNK_BYTES = 8 * 1024 * 1024
"""A chunk of this many bytes is full, however few rows it has."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rejected row, or `count` rows from `row` on that cannot be told apart.

    `row` is its number in its file; in JSONL, the offset of its line. `rest`: an unknown number of rows to the end.
    """

    row: int
    reason: str
    id: Any = None
    count: int = 1
    rest: bool = False

    def line(self, file: str) -> bytes:
        known = {} if self.id is None else {"id": self.id}
        more: dict[str, Any] = {} if self.count == 1 else {"rows": self.count}
        more |= {"rest": True} if self.rest else {}
        entry = {**known, "file": file, "row": self.row, "reason": self.reason, **more}
        return json.dumps(entry, default=str).encode() + b"\n"


@dataclass(slots=True)
class Chunk:
    """Rows as they were read: `table` has their columns, `rows` their places, `inputs` what is sent for each.

    An input is bytes where it is not valid text. `ids` are None without an id column. `rejected` are other rows.
    """

    table: Any
    rows: list[int]
    inputs: list[Any]
    ids: list[Any]
    rejected: list[Rejection]
