"""Reading streams frame by frame, as they stand on the wire."""

import json


async def sse(response):
    """The data of each server-sent event of an unnamed-event stream, undecoded; comments are left out."""
    body = (await response.read()).decode()
    assert body.endswith("\n\n")
    frames = [frame for frame in body.removesuffix("\n\n").split("\n\n") if not frame.startswith(":")]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames), frames
    return [frame.removeprefix("data: ") for frame in frames]


async def ndjson(response):
    body = (await response.read()).decode()
    assert body.endswith("\n")
    return [json.loads(line) for line in body.splitlines()]
