"""instructor: validated objects, by tools and by JSON schema, nested, streamed and as lists."""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

URL, MODEL = os.environ["NODE_URL"], os.environ.get("NODE_MODEL", "smollm2")


Kind = Literal["home", "work"]


class Address(BaseModel):
    street: str = Field(max_length=20)
    kind: Kind


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)
    address: Address | None = None
    tags: list[Kind] = Field(max_length=2)


ask = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Ana is 30 and lives at 1 Main Street."}],
    "max_tokens": 200,
}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(OpenAI(base_url=URL + "/v1", api_key="unused"), mode=mode)
    person = client.chat.completions.create(response_model=Person, max_retries=0, **ask)
    assert isinstance(person, Person), mode
    partial = list(client.chat.completions.create_partial(response_model=Person, max_retries=0, **ask))
    assert partial, mode
people = instructor.from_openai(OpenAI(base_url=URL + "/v1", api_key="unused"), mode=instructor.Mode.JSON_SCHEMA)
assert people.chat.completions.create(response_model=Person, max_retries=0, strict=True, **ask)
print("all as expected")
