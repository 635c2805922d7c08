"""Chat about images over HTTP, on the CPU and the (emulated) NPU, with stock clients.

The model has SmolLM2's weights and no vision (`tests/real/colour_vision`): this proves that images reach the
language model, in order, and not that a model sees. An image must get the answer that its `words` get, at a high
temperature with a seed: so the answers to two prompts differ on every CPU, whatever words the model prefers. The node
is one of its own, for its model: its start, and that of the NPU's engine, are most of this file's seconds.
"""

import base64
import io
import itertools
import time

import openai
import pytest
from PIL import Image

from tests.real import colour_vision
from tests.real.colour_vision import words
from tests.support.later import Later
from tests.support.nodes import start_node
from worker_node.core.types import Device
from worker_node.engines.protocol import EngineSpec
from worker_node.tasks.generate.messages import GenerateJob, ImagePrompt, RawImage, Sampling, Step
from worker_node.tasks.vision.engine import VisionRunner

ollama = Later("ollama")


pytestmark = pytest.mark.real

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
PROMPT = "What colour is it?"
# Where the answer depends on each number that reaches the model.
SAMPLED = {"temperature": 2.0, "seed": 1}
# What an image has in this model: one for each of its quarters, and one more that GenAI adds.
TOKENS = 5


def encoded(colour, form="PNG", size=(300, 200)):
    stream = io.BytesIO()
    Image.new("RGB", size, COLOURS[colour]).save(stream, form)
    return base64.b64encode(stream.getvalue()).decode()


def part(data, kind="png"):
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}", "detail": "low"}}


def text(content):
    return {"type": "text", "text": content}


def question(*parts):
    return [{"role": "user", "content": [*parts, text(PROMPT)]}]


@pytest.fixture(scope="module")
def models(store):
    """The directory of the model, beside the one for what is compiled: both are kept between runs of the suite."""
    return colour_vision.kept_colours(store)


@pytest.fixture(scope="module")
def seeing(models, tmp_path_factory):
    config = tmp_path_factory.mktemp("vision") / "node.toml"
    config.write_text(
        f"""
        [[models]]
        name = "colours"
        path = "{models}"
        placements = ["CPU", "NPU"]
        max_prompt_len = 256
        min_response_len = 64
        """
    )
    environment = {"NPU_NODE_NPU_EMULATION": "1", "NPU_NODE_COMPILE_CACHE": str(models.parent / "compiled")}
    with start_node("--config", str(config), **environment) as running:
        yield running


@pytest.fixture
async def client(seeing):
    async with openai.AsyncOpenAI(base_url=seeing.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


async def asked(client, *parts, device=None, **fields):
    headers = {"X-NPU-Require-Device": device} if device else {}
    raw = await client.chat.completions.with_raw_response.create(
        model="colours", messages=question(*parts), max_tokens=12, extra_headers=headers, **SAMPLED | fields
    )
    return raw.parse(), raw.headers


async def answer(client, *parts, **options):
    reply, _ = await asked(client, *parts, **options)
    return reply.choices[0].message.content


@pytest.mark.parametrize("device", ["CPU", "NPU"])
async def test_an_image_gets_the_answer_of_its_words_on_each_device(client, device):
    answers = set()
    for colour in COLOURS:
        reply, headers = await asked(client, part(encoded(colour)), device=device)
        content = reply.choices[0].message.content
        assert content == await answer(client, text(words(colour)), device=device)
        answers.add(content)
        assert headers["X-NPU-Node-Device"] == device
        if device == "NPU":
            assert headers["X-NPU-Node-Devices"] == "language=NPU, vision=CPU"
            assert headers["X-NPU-Emulated"] == "true"
            assert int(headers["X-NPU-Busy-Delta-Us"]) > 0
        else:
            assert "X-NPU-Node-Devices" not in headers
    assert len(answers) == len(COLOURS)


async def test_responses_stream_and_ollama_see_the_image_too(client, seeing):
    async def responded(first):
        content = [first, {"type": "input_text", "text": PROMPT}]
        response = await client.responses.create(
            model="colours",
            input=[{"role": "user", "content": content}],
            max_output_tokens=12,
            temperature=SAMPLED["temperature"],
            extra_body={"seed": SAMPLED["seed"]},
        )
        return response.output_text

    url = "data:image/png;base64," + encoded("red")
    red = await responded({"type": "input_image", "image_url": url, "detail": "auto"})
    assert red == await responded({"type": "input_text", "text": words("red")})

    stream = await client.chat.completions.create(
        model="colours", messages=question(part(encoded("blue"))), max_tokens=12, stream=True, **SAMPLED
    )
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == await answer(client, text(words("blue")))
    assert sum(map(bool, pieces)) > 2

    green = base64.b64decode(encoded("green"))
    options = {"num_predict": 12, "top_k": 0, **SAMPLED}
    asked_with_image = [{"role": "user", "content": PROMPT, "images": [green]}]
    async with ollama.AsyncClient(host=seeing.url) as local:
        chatted = await local.chat("colours", asked_with_image, options=options)
        generated = await local.generate("colours", PROMPT, images=[green], options=options)
        shown = await local.show("colours")
    assert chatted.message.content == await answer(client, text(words("green")))
    assert generated.response == chatted.message.content
    assert shown.capabilities == ["completion", "vision"]


async def test_anthropics_messages_see_the_image_too(http, seeing):
    counts = []
    for size in (1, 2):
        source = {"type": "base64", "media_type": "image/png", "data": encoded("red")}
        images = [{"type": "image", "source": source}] * size
        turn = {"role": "user", "content": [*images, text(PROMPT)]}
        body = {"model": "colours", "max_tokens": 4, "messages": [turn]}
        async with http.post(seeing.url + "/v1/messages", json=body) as reply:
            assert reply.status == 200, await reply.text()
            usage = (await reply.json())["usage"]
            counts.append(usage["input_tokens"] + usage["cache_read_input_tokens"])
    assert counts[1] - counts[0] >= TOKENS - 1


async def test_images_count_in_usage(client):
    none, _ = await asked(client)
    one, headers = await asked(client, part(encoded("red")))
    three, _ = await asked(client, *(part(encoded(colour)) for colour in COLOURS))
    assert one.usage.prompt_tokens - none.usage.prompt_tokens == TOKENS
    assert three.usage.prompt_tokens - none.usage.prompt_tokens == 3 * TOKENS
    assert int(headers["X-NPU-Node-Token-Count"]) == one.usage.prompt_tokens


async def test_images_are_seen_in_their_order_and_places(client):
    places = ("First colour:", " Second colour:", " Third colour:")
    answers = set()
    for order in itertools.permutations(COLOURS):
        seen = [(text(place), part(encoded(colour))) for place, colour in zip(places, order, strict=True)]
        read = [(text(place), text(words(colour))) for place, colour in zip(places, order, strict=True)]
        found = await answer(client, *itertools.chain(*seen))
        assert found == await answer(client, *itertools.chain(*read))
        answers.add(found)
    assert len(answers) == 6


BAD = {
    "truncated": (lambda: [part(encoded("red", "JPEG", (900, 900))[:1600])], "truncated or damaged"),
    "remote": (
        lambda: [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}],
        "inline as a data URL",
    ),
    "nine": (lambda: [part(encoded("red"))] * 9, "the bound is 8"),
    "GenAI's tag": (lambda: [{"type": "text", "text": "<ov_genai_image_0>"}], "stands for an image"),
    "the model's mark": (lambda: [{"type": "text", "text": "<image>"}], "stands for an image"),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_is_a_clear_error_that_harms_nobody(client, seeing, case):
    before = seeing.engine_processes()
    parts, told = BAD[case]
    with pytest.raises(openai.BadRequestError) as refusal:
        await asked(client, *parts())
    assert told in refusal.value.message
    assert seeing.engine_processes() == before


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"response_format": {"type": "json_object"}},
        {"n": 2},
        {"logprobs": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_the_engine_cannot_do_is_refused_by_name(client, fields):
    with pytest.raises(openai.BadRequestError) as refusal:
        await asked(client, part(encoded("red")), **fields)
    assert next(iter(fields)) in refusal.value.message


def test_a_cancelled_answer_stops_the_pipeline_at_its_next_token(models):
    """In this process, on the real pipeline: nothing is computed after the command has arrived."""
    runner = VisionRunner(EngineSpec("colours", "vision", str(models), Device.CPU, "", {}))
    runner.load()
    seen = ImagePrompt(f"<ov_genai_image_0>{PROMPT}", [RawImage(64, 64, bytes([255, 0, 0]) * 64 * 64)], TOKENS)
    for job in (1, 2):
        runner.submit(
            GenerateJob(job, b"", 1000, time.monotonic() + 600, Sampling(ignore_eos=True), vision_prompt=seen)
        )
    events, polls = [], []

    def poll():
        polls.append(len(events))
        if len(polls) == 3:
            runner.cancel(1)
            runner.cancel(2)

    runner.step(events.append, poll)
    assert len(polls) == 3, "it went on after the third token"
    assert [delta.finish for event in events if isinstance(event, Step) for delta in event.deltas] == [None] * 3
    assert not runner.has_work, "what waited behind it is gone, too"
    # The pipeline is usable, and takes up nothing of what was cancelled.
    runner.submit(GenerateJob(3, b"", 8, time.monotonic() + 600, vision_prompt=seen))
    runner.step(events.append, lambda: None)
    assert events[-1].deltas[0].finish in {"stop", "length"}
    runner.close()


async def test_a_deadline_in_the_middle_of_an_answer_is_told_and_costs_no_engine(client, seeing):
    before = seeing.engine_processes()
    with pytest.raises(openai.APIStatusError) as late:
        await client.chat.completions.create(
            model="colours",
            messages=question(part(encoded("red"))),
            max_tokens=100_000,
            extra_body={"ignore_eos": True},
            extra_headers={"X-Request-Timeout-Ms": "1500"},
        )
    assert (late.value.status_code, late.value.body["code"]) == (504, "deadline_exceeded")
    assert await answer(client, part(encoded("blue"))) == await answer(client, text(words("blue")))
    assert seeing.engine_processes() == before
