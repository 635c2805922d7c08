"""The official test suite of JSON Schema, draft 2020-12, against the grammars.

    python -m tests.support.schema_suite

fetches it into the environment, once, and `make test` does so first.
"""

import hashlib
import itertools
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.support.recogniser import Recogniser
from worker_node.core.errors import BadRequest
from worker_node.structured_output.schema import compile_schema

# The source distribution of the validator `jsonschema` carries the suite; a wheel does not.
PACKAGE = "jsonschema==4.26.0"
SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
_KEPT = Path(sys.prefix) / "share" / "json-schema-test-suite"


class Group(NamedTuple):
    """A schema of the suite with its instances; `name` is file and description."""

    name: str
    schema: object
    tests: list


class Outcome(NamedTuple):
    """`refusal`: why the schema is rejected, or None; `forbidden`: spellings of invalid instances that are admitted."""

    group: Group
    refusal: str | None
    param: str | None = None
    forbidden: tuple = ()
    admitted: int = 0
    valid: int = 0


def groups(part="."):
    """The groups of the suite; `part` "optional/format" has those of the formats."""
    directory = _suite() / part
    return [
        Group(f"{path.stem}: {group['description']}", group["schema"], group["tests"])
        for path in sorted(directory.glob("*.json"))
        for group in json.loads(path.read_text("utf-8"))
    ]


def run(group):
    """Compile one group's schema, and try its instances."""
    try:
        grammar = Recogniser(compile_schema(group.schema, "schema"))
    except BadRequest as refusal:
        return Outcome(group, refusal.message, refusal.param)
    forbidden = []
    admitted = valid = 0
    for test in group.tests:
        written = [text for text in spellings(test["data"]) if grammar.admits(text)]
        if test["valid"]:
            valid += 1
            admitted += bool(written)
        else:
            forbidden += written
    return Outcome(group, None, None, forbidden, admitted, valid)


def spellings(instance):
    """Ways to write an instance as JSON: keys in other orders, blanks, escapes, whole numbers with a decimal point."""
    orders = list(itertools.islice(_orders(instance), 24))
    texts = [json.dumps(order, ensure_ascii=False, separators=(",", ":")) for order in orders]
    texts += [json.dumps(instance), json.dumps(instance, indent=1), json.dumps(_decimal(instance))]
    return list(dict.fromkeys([*texts, "".join(_escaped(texts[0]))]))


def _orders(value):
    if isinstance(value, dict):
        for keys in itertools.permutations(value):
            for parts in itertools.product(*(list(itertools.islice(_orders(value[key]), 6)) for key in keys)):
                yield dict(zip(keys, parts, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*(list(itertools.islice(_orders(part), 6)) for part in value)))
    else:
        yield value


def _decimal(value):
    if isinstance(value, dict):
        return {key: _decimal(part) for key, part in value.items()}
    if isinstance(value, list):
        return list(map(_decimal, value))
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else value


def _escaped(text):
    """Letters inside strings as codes."""
    inside = after = False
    for character in text:
        if character == '"' and not after:
            inside = not inside
        yield f"\\u{ord(character):04x}" if inside and character.isalpha() and not after else character
        after = character == "\\" and not after


def _suite():
    directory = _KEPT / SHA256[:12]
    if not directory.exists():
        _KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_KEPT) as scratch:
            _fetch(Path(scratch))
            found = next(Path(scratch).glob("*/json/tests/draft2020-12"))
            if not directory.exists():
                found.rename(directory)
    return directory


def _fetch(scratch):
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema"]
    subprocess.run([*pip, "--dest", str(scratch), PACKAGE], check=True, timeout=100)
    archive = next(scratch.glob("*.tar.gz"))
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
        raise RuntimeError(f"{PACKAGE}: the archive is not the one that is pinned here")
    with tarfile.open(archive) as opened:
        opened.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and newer have it
        opened.extractall(scratch)  # noqa: S202  (its hash was compared)


if __name__ == "__main__":
    _suite()
