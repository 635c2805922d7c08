"""Passports: what `npu-node certify` found of a model on a device, signed, and bound to all that it depends on."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from worker_node.core.errors import ConfigurationError

log = logging.getLogger(__name__)

_MOST_BYTES = 1_000_000
_KEY, _PUBLIC_KEYS = "private.key", "public.keys"
_HASH = r"^[0-9a-f]{64}$"
_NAMES = {"model_hash": "model", "settings_hash": "settings", "openvino": "OpenVINO version"}
Verdict = Literal["certified", "limited", "failed", "incomplete"]
State = Literal["certified", "limited", "failed", "expired", "not certified"]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a result holds for; where anything of it differs, another certification is needed."""

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
    """`max_prompt_tokens`: the longest prompt with a right answer; null for models without prompts."""

    max_prompt_tokens: int | None = Field(default=None, ge=1)


class Rates(_Part):
    """What was measured, per second; null where it was not."""

    prompt_tokens_per_s: float | None = Field(default=None, ge=0.01, le=1e9)
    tokens_per_s: float | None = Field(default=None, ge=0.01, le=1e9)
    texts_per_s: float | None = Field(default=None, ge=0.01, le=1e9)


class Efficiency(_Part):
    """What a joule does: the NPU's, or of a CPU and GPU the whole package's; null where it was not measured."""

    tokens_per_joule: float | None = Field(default=None, gt=0, le=1e9)
    texts_per_joule: float | None = Field(default=None, gt=0, le=1e9)


class Frequencies(_Part):
    """What bounds the NPU's frequency, in MHz: the device's own bounds, and those that were set."""

    min: int | None = Field(default=None, ge=0, le=100_000)
    efficient: int | None = Field(default=None, ge=0, le=100_000)
    max: int | None = Field(default=None, ge=0, le=100_000)
    set_min: int | None = Field(default=None, ge=0, le=100_000)
    set_max: int | None = Field(default=None, ge=0, le=100_000)


class Power(_Part):
    """What supplied the machine when the result was made; null where the kernel does not say."""

    source: Literal["AC", "battery"] | None = None
    adapter_watts: float | None = Field(default=None, ge=1, le=1000)
    npu_mhz: Frequencies = Frequencies()


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
    """The result of a certification; `incomplete` where only some checks were asked for.

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
    efficiency: Efficiency = Efficiency()
    power: Power = Power()
    checks: list[CheckResult] = Field(max_length=100)
    signature: Signature | None = None

    @classmethod
    def read(cls, content: bytes) -> Passport:
        """A passport of JSON; its signature is not checked. Raises ConfigurationError."""
        try:
            if len(content) > _MOST_BYTES:
                raise ConfigurationError(f"a passport must have at most {_MOST_BYTES} bytes, got {len(content)}")
            passport = cls.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            place, said = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
            problem = f"{place}: {said}" if place else said
        except (ValueError, RecursionError) as error:
            problem = str(error)
        else:
            return passport
        raise ConfigurationError(f"not a passport: {problem}"[:500])

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        failed = any(check.status == "failed" for check in self.checks)
        if self.verdict in {"certified", "limited"} and failed:
            raise ValueError("a verdict must follow from the checks, and one of them failed")
        if self.verdict == "limited" and self.limits.max_prompt_tokens is None:
            raise ValueError("limits must have max_prompt_tokens where the verdict is limited")
        try:
            offset = self.made_at.tzinfo
        except ValueError:
            offset = None
        if offset is None:
            raise ValueError("made must be a time with its offset, such as 2026-11-27T10:00:00+00:00")
        return self

    @property
    def made_at(self) -> datetime:
        return datetime.fromisoformat(self.made)

    @property
    def identity(self) -> Identity:
        return Identity(**{name: getattr(self, name) for name in Identity.__dataclass_fields__})

    @property
    def file_name(self) -> str:
        """One for each model, device and kind of device."""
        model = "".join(letter if letter.isalnum() or letter in ".-_" else "_" for letter in self.model)
        return f"{model}.{self.device}{'-emulated' if self.emulated else ''}.json"

    def signed(self, key: Ed25519PrivateKey) -> Passport:
        signature = Signature(key=_public(key.public_key()), value=key.sign(self._content()).hex())
        return self.model_copy(update={"signature": signature})

    def check_signature(self, trusted: Iterable[str]) -> None:
        """Raises ConfigurationError for one that is unsigned, changed, or of a key that is not trusted."""
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
    """What a passport says of a placement now; `passport` only where it holds."""

    state: State
    reason: str
    passport: Passport | None = None


NOT_CERTIFIED = Standing("not certified", "npu-node certify has not been run for it")


def standing(passports: Iterable[Passport], identity: Identity) -> Standing:
    best = NOT_CERTIFIED
    for passport in sorted(passports, key=lambda passport: passport.made_at, reverse=True):
        if passport.verdict == "incomplete" or (passport.emulated and not identity.emulated):
            continue
        given, found = asdict(passport.identity), asdict(identity)
        changed = tuple(name for name in found if given[name] != found[name])
        if not changed:
            failed = [check.name for check in passport.checks if check.status == "failed"]
            emulated = ", of an emulated NPU" if passport.emulated else ""
            words = f"at {passport.made}, compared with {passport.reference}{emulated}"
            if passport.verdict == "failed":
                words = f"failed at {passport.made}: {', '.join(failed) or 'see the passport'}"
            elif passport.verdict == "limited":
                words = f"prompts up to {passport.limits.max_prompt_tokens} tokens, at {passport.made}"
            return Standing(passport.verdict, words, passport)
        if best is not NOT_CERTIFIED:
            continue
        names = " and the ".join(_NAMES.get(name, name) for name in changed)
        best = Standing("expired", f"the {names} changed since {passport.made}")
    return best


class PassportStore:
    """The passports of a directory, and the node's key beside them (mode 0600; leave it out of backups).

    The node's key, those that it replaced, and the `trusted` ones may sign. Everything but the private key may be read
    by other users: root certifies, and a service reads the result. Raises ConfigurationError.
    """

    def __init__(self, directory: Path, trusted: Sequence[str] = ()) -> None:
        self.directory = directory.expanduser()
        self._trusted = frozenset(trusted)

    def sign_and_store(self, passport: Passport) -> Passport:
        """Sign a result with the node's key, which is made if there is none, and keep it."""
        signed = passport.signed(self.private_key())
        self._write(signed.file_name, signed.model_dump_json(indent=1).encode())
        return signed

    def add(self, content: bytes) -> Passport:
        """Keep a passport from elsewhere, whose signature is checked, unless a newer one is kept."""
        passport = Passport.read(content)
        passport.check_signature(self.keys())
        for kept in self.list():
            if kept.file_name == passport.file_name and kept.made_at > passport.made_at:
                raise ConfigurationError(
                    f"the passport must be newer than the one that is kept, of {kept.made}; got one of {passport.made}"
                )
        self._write(passport.file_name, content)
        return passport

    def list(self) -> list[Passport]:
        """Those that are signed by a trusted key; the log says why others do not count."""
        found, keys = [], self.keys()
        for path in sorted(self.directory.glob("*.json")):
            try:
                passport = Passport.read(path.read_bytes())
                passport.check_signature(keys)
            except OSError as error:
                log.warning("%s does not count: it cannot be read: %s", path, error.strerror)
            except ConfigurationError as error:
                log.warning("%s does not count: %s", path, error.message)
            else:
                found.append(passport)
        return found

    def keys(self) -> frozenset[str]:
        """The public keys that are trusted (hex): the node's own, also replaced ones, and those of the settings."""
        try:
            return self._trusted | self._own_keys()
        except ConfigurationError as error:
            log.warning("%s; what this node signed does not count", error.message)
            return self._trusted

    def of(self, model: str, device: str) -> Sequence[Passport]:
        """Those of `list` for a model on a kind of device."""
        return [passport for passport in self.list() if (passport.model, passport.device) == (model, device)]

    def private_key(self) -> Ed25519PrivateKey:
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
        self._keep_public(key)
        return key

    def rotate(self) -> str:
        """Replace the node's key, and return the new public one. What the old one signed counts until it expires."""
        key = Ed25519PrivateKey.generate()
        content = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        # First the public one: interrupted between the two, no key would sign what nobody trusts.
        public = self._keep_public(key)
        self._write(_KEY, content, mode=0o600)
        return public

    def _own_keys(self) -> set[str]:
        path = self.directory / _PUBLIC_KEYS
        try:
            return set(path.read_text(encoding="ascii", errors="replace").split())
        except (FileNotFoundError, NotADirectoryError):
            return set()
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None

    def _keep_public(self, key: Ed25519PrivateKey) -> str:
        public, known = _public(key.public_key()), self._own_keys()
        if public not in known:
            self._write(_PUBLIC_KEYS, "".join(f"{each}\n" for each in sorted({*known, public})).encode())
        return public

    def _write(self, name: str, content: bytes, mode: int = 0o644) -> None:
        path = self.directory / name
        part = path.with_name(f".{name}.part")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            try:
                with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                    file.write(content)
                part.chmod(mode)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _public(key: Ed25519PublicKey) -> str:
    return key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw).hex()
