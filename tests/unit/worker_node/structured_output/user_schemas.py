"""Schemas as users have them: of pydantic models, of JavaScript's schema libraries, and of the tools of frameworks."""

import datetime
import enum
import ipaddress
import json
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, HttpUrl, RootModel, TypeAdapter

_DATA = Path(__file__).parents[3] / "data"


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Address(BaseModel):
    street: str = Field(min_length=1, max_length=40)
    zip: str = Field(pattern=r"^\d{5}$")
    country: Literal["DE", "FR"] = "DE"


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(min_length=1)]
    age: int | None = Field(default=None, ge=0, lt=150)
    addresses: list[Address] = Field(max_length=3)
    colour: Colour
    born: datetime.date
    seen: datetime.datetime | None


class Node(BaseModel):
    value: int
    children: list["Node"] = []


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: list[Literal["sit", "roll", "beg"]] = Field(min_length=1)


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    other: Cat | Dog | str | None = None


class Numbers(BaseModel):
    whole: Annotated[int, Field(gt=10**17)]
    share: Annotated[float, Field(ge=0, le=1)]
    step: Annotated[float, Field(multiple_of=0.25, ge=0)]
    five: Annotated[int, Field(multiple_of=5)]
    negative: Annotated[int, Field(lt=0)]


class Texts(BaseModel):
    id: uuid.UUID
    at: datetime.time
    takes: datetime.timedelta
    host: ipaddress.IPv4Address | ipaddress.IPv6Address
    code: Annotated[str, Field(pattern=r"^[A-Z]{2,3}-\d+$", max_length=12)]
    raw: bytes


class Addresses(BaseModel):
    home: HttpUrl
    mail: str = Field(json_schema_extra={"format": "email"}, max_length=254)


class Containers(BaseModel):
    pair: tuple[int, str]
    many: tuple[bool, ...]
    counts: dict[str, int]
    flags: dict[Colour, bool] = {}
    coded: dict[Annotated[str, Field(pattern="^[a-z]{1,3}$")], float] = Field(default={}, min_length=1)
    anything: Any
    loose: dict[str, Any] = {}


PYDANTIC = [
    Person,
    Node,
    Owner,
    Numbers,
    Texts,
    Addresses,
    Containers,
    RootModel[list[Cat]],
    list[Person],
    int | None,
]


def pydantic_schemas():
    """(name, schema, function that raises for a text that the model does not take)."""
    for model in PYDANTIC:
        adapter = TypeAdapter(model)
        yield getattr(model, "__name__", str(model)), adapter.json_schema(), adapter.validate_json


def javascript_schemas():
    """(name, schema) as zod 3 and 4, zod-to-json-schema, TypeBox and valibot wrote them."""
    lines = (_DATA / "schemas" / "javascript.jsonl").read_text("utf-8").splitlines()
    return [(one["name"], one["schema"]) for one in map(json.loads, lines)]


def framework_schemas():
    """(name, schema) of answers and tools in the recorded requests of clients and frameworks."""
    found = {}
    for path in sorted(_DATA.glob("*/*.jsonl")):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            body = json.loads(line).get("body") or {}
            for schema in filter(lambda one: isinstance(one, dict), _schemas_in(body)):
                found.setdefault(json.dumps(schema, sort_keys=True), (f"{path.stem}:{number}", schema))
    return list(found.values())


def _schemas_in(body):
    for tool in body.get("tools") or []:
        yield (tool.get("function") or tool).get("parameters")
    form = body.get("response_format") or {}
    yield (form.get("json_schema") or {}).get("schema") if isinstance(form, dict) else None
    text = body.get("text") or {}
    yield (text.get("format") or {}).get("schema") if isinstance(text, dict) else None
    yield from (body.get(name) for name in ("format", "guided_json", "json_schema"))
