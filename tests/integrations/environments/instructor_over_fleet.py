"""instructor over the SDK clients of this package, blocking and awaited: objects by tools and by schema, streamed."""

import asyncio
import os

import instructor
from pydantic import BaseModel, Field

import backend_client


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)
ROUNDS = 4
ask = {
    "response_model": Person,
    "model": os.environ["CHAT_MODEL"],
    "messages": [{"role": "user", "content": "Ana is 30."}],
    "max_retries": 0,
    "max_tokens": 100,
}


async def awaited():
    async with backend_client.openai() as openai:
        for mode in MODES:
            client = instructor.from_openai(openai, mode=mode)
            people = await asyncio.gather(*(client.chat.completions.create(**ask) for _ in range(ROUNDS)))
            assert all(isinstance(person, Person) for person in people), mode


with backend_client.sync.openai() as blocking:
    for mode in MODES:
        client = instructor.from_openai(blocking, mode=mode)
        for _ in range(ROUNDS):
            assert isinstance(client.chat.completions.create(**ask), Person), mode
        assert list(client.chat.completions.create_partial(**ask)), mode
asyncio.run(awaited())
print("all as expected")
