"""Passports: what `npu-node certify` found of a model on a device, signed, and bound to all that it depends on."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from worker_node.core.errors import ConfigurationError

log = logging.getLogger(__name__)

_MOST_BYTES = 1_000_000
_KEY, _OWN_KEYS = "private.key", "own_keys"
_HASH = r"^[0-9a-f]{64}$"
_NAMES = {"model_hash": "model", "settings_hash": "settings", "openvino": "OpenVINO version"}
Verdict = Literal["certified", "limited", "failed", "incomplete"]
State = Literal["certified", "limited", "failed", "expired", "not certified"]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a result holds for: other weights, another device, driver, compiler, OpenVINO or other settings need their
    own.
    """

    model: str
    model_hash: str
    device: str
    architecture: str
    driver: str
    compiler: str
    openvino: str
    settings_hash: str
    emulated: bool


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class Limits(_Part):
    """`max_prompt_tokens`: the longest prompt that was answered rightly; null: the whole window."""

    max_prompt_tokens: int | None = Field(default=None, ge=1)


class Rates(_Part):
    """What was measured, per second; null where it was not."""

    prompt_tokens_per_s: float | None = Field(default=None, gt=0)
    tokens_per_s: float | None = Field(default=None, gt=0)
    texts_per_s: float | None = Field(default=None, gt=0)


class CheckResult(_Part):
    """One check; `facts` are numbers of docs/npu-facts.md."""

    name: str = Field(max_length=100)
    status: Literal["passed", "failed", "skipped"]
    detail: str = Field(max_length=1000)
    facts: list[int] = Field(max_length=30)
    values: dict[str, Any]


class Signature(_Part):
    """Ed25519 over the passport without this field, as JSON with sorted keys and no spaces (UTF-8); hexadecimal."""

    key: str = Field(pattern=_HASH)
    value: str = Field(pattern=r"^[0-9a-f]{128}$")


class Passport(_Part):
    """The result of a certification. `verdict`: certified, limited (up to `limits`), failed, or incomplete, which is
    never signed: some checks only were asked for.

    `reference` says which CPU the device was compared with: stored answers of another one, or this machine's.
    """

    format: Literal[1] = 1
    model: str = Field(min_length=1, max_length=200)
    model_hash: str = Field(pattern=_HASH)
    device: Literal["NPU", "GPU", "CPU"]
    architecture: str = Field(max_length=200)
    driver: str = Field(max_length=200)
    compiler: str = Field(max_length=200)
    openvino: str = Field(max_length=200)
    settings_hash: str = Field(pattern=_HASH)
    emulated: bool
    verdict: Verdict
    made: str = Field(max_length=40)
    node: str = Field(max_length=200)
    version: str = Field(max_length=40)
    reference: str = Field(max_length=100)
    limits: Limits
    rates: Rates
    checks: list[CheckResult] = Field(max_length=100)
    signature: Signature | None = None

    @classmethod
    def read(cls, content: bytes) -> Passport:
        """A passport of JSON, its form checked and not its signature. Raises ConfigurationError."""
        try:
            if len(content) > _MOST_BYTES:
                raise ConfigurationError(f"a passport must have at most {_MOST_BYTES} bytes, got {len(content)}")
            passport = cls.model_validate_json(content)
            datetime.fromisoformat(passport.made)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        except (ValueError, RecursionError) as error:
            problem = str(error)
        else:
            return passport
        raise ConfigurationError(f"not a passport: {problem}"[:500])

    @property
    def identity(self) -> Identity:
        """What it holds for."""
        return Identity(**{name: getattr(self, name) for name in Identity.__dataclass_fields__})

    @property
    def file_name(self) -> str:
        """One for each model, device and kind of device."""
        model = "".join(letter if letter.isalnum() or letter in ".-_" else "_" for letter in self.model)
        return f"{model}.{self.device}{'-emulated' if self.emulated else ''}.json"

    def signed(self, key: Ed25519PrivateKey) -> Passport:
        """The passport with the signature of a key."""
        signature = Signature(key=_public(key.public_key()), value=key.sign(self._content()).hex())
        return self.model_copy(update={"signature": signature})

    def check_signature(self, trusted: Iterable[str]) -> None:
        """Raises ConfigurationError for a passport without a signature, of a key that is not trusted, or changed."""
        if self.signature is None:
            raise ConfigurationError("the passport is not signed")
        if self.signature.key not in trusted:
            raise ConfigurationError(
                f"the passport is signed by {self.signature.key}, which is neither this node's key nor in trusted_keys"
            )
        try:
            public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.signature.key))
            public.verify(bytes.fromhex(self.signature.value), self._content())
        except (InvalidSignature, ValueError):
            raise ConfigurationError("the passport was changed after it was signed") from None

    def _content(self) -> bytes:
        kept = self.model_dump(mode="json", exclude={"signature"})
        return json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@dataclass(frozen=True, slots=True)
class Standing:
    """What a passport says of a placement now; `reason` in words, `passport` only where it holds.

    `changed`: the fields of the identity for which it has expired.
    """

    state: State
    reason: str
    passport: Passport | None = None
    changed: frozenset[str] = frozenset()


NOT_CERTIFIED = Standing("not certified", "npu-node certify has not been run for it")


def standing(passports: Iterable[Passport], identity: Identity) -> Standing:
    """What the passports of a model on a device say of it as it is now."""
    best = NOT_CERTIFIED
    for passport in passports:
        if passport.verdict == "incomplete" or (passport.emulated and not identity.emulated):
            continue
        given, found = asdict(passport.identity), asdict(identity)
        changed = tuple(name for name in found if given[name] != found[name])
        if not changed:
            return Standing(passport.verdict, _words(passport), passport)
        names = " and the ".join(_NAMES.get(name, name) for name in changed)
        best = Standing("expired", f"the {names} changed since {passport.made}", changed=frozenset(changed))
    return best


class PassportStore:
    """The passports of a directory, and the node's key beside them (mode 0600; leave it out of backups).

    Its own keys, also those that were replaced, and the `trusted` ones may sign. Raises ConfigurationError.
    """

    def __init__(self, directory: Path, trusted: Sequence[str] = ()) -> None:
        self.directory = directory.expanduser()
        self._trusted = frozenset(trusted)

    def sign_and_store(self, passport: Passport) -> Passport:
        """Sign a result with the node's key, and keep it. Raises ConfigurationError."""
        signed = passport.signed(self.private_key())
        self._write(signed.file_name, signed.model_dump_json(indent=1).encode())
        return signed

    def add(self, content: bytes) -> Passport:
        """Keep a passport from elsewhere, whose signature is checked."""
        passport = Passport.read(content)
        passport.check_signature(self.keys())
        self._write(passport.file_name, content)
        return passport

    def list(self) -> list[Passport]:
        """Those that can be read and are signed by a key that is trusted; of others the log says why they are not."""
        found = []
        for path in sorted(self.directory.glob("*.json")):
            with contextlib.suppress(OSError):
                try:
                    passport = Passport.read(path.read_bytes()[: _MOST_BYTES + 1])
                    passport.check_signature(self.keys())
                except ConfigurationError as error:
                    log.warning("%s does not count: %s", path, error.message)
                else:
                    found.append(passport)
        return found

    def keys(self) -> frozenset[str]:
        """The public keys that are trusted, in hexadecimal: the node's own, and those of the settings."""
        own: list[str] = []
        with contextlib.suppress(OSError):
            own = (self.directory / _OWN_KEYS).read_text(encoding="ascii").split()
        return self._trusted | frozenset(own)

    def rotate(self) -> str:
        """Replace the node's key, and return the new public one. What the old one signed still counts."""
        private = Ed25519PrivateKey.generate()
        content = private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self._write(_KEY, content)
        public = _public(private.public_key())
        kept = self.keys() - self._trusted
        self._write(_OWN_KEYS, "".join(f"{key}\n" for key in sorted({*kept, public})).encode())
        return public

    def of(self, model: str, device: str) -> Sequence[Passport]:
        """Those of `list` for a model on a kind of device."""
        return [passport for passport in self.list() if (passport.model, passport.device) == (model, device)]

    def private_key(self) -> Ed25519PrivateKey:
        """The node's key, which is made if there is none. Raises ConfigurationError."""
        path = self.directory / _KEY
        if not path.exists():
            self.rotate()
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{path} cannot be used: {error}; npu-node passports rotate makes another"
            ) from None
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigurationError(f"{path} must hold an Ed25519 key; npu-node passports rotate makes another")
        return key

    def _write(self, name: str, content: bytes) -> None:
        path = self.directory / name
        part = path.with_name(f".{name}.part")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(content)
            part.replace(path)
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None


def now() -> str:
    """The time, as passports have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _words(passport: Passport) -> str:
    failed = [check.name for check in passport.checks if check.status == "failed"]
    if passport.verdict == "failed":
        return f"failed at {passport.made}: {', '.join(failed) or 'see the passport'}"
    if passport.verdict == "limited":
        return f"prompts up to {passport.limits.max_prompt_tokens} tokens, at {passport.made}"
    return f"at {passport.made}, compared with {passport.reference}"


def _public(key: Ed25519PublicKey) -> str:
    return key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw).hex()
