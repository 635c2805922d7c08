"""The routes of OpenAI's dialect of a scripted node: chats that call tools, fill schemas, and count tokens."""

import json

from aiohttp import web

from tests.faults.scripted_node import ANSWER, WRITER, choice, data_event

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def chunk(choices, **more):
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": WRITER,
        "choices": choices,
        **more,
    }


def pieces_of(body):
    """The deltas of the answer to a request: a tool call if there are tools, an object if there is a schema."""
    if body.get("tools"):
        call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
        parts = [{"index": 0, "function": {"arguments": part}} for part in ('{"city":', '"Bonn"}')]
        return [{"tool_calls": [part]} for part in (call, *parts)], "tool_calls"
    if body.get("response_format"):
        return [{"content": part} for part in ('{"name": "Ada",', ' "age": 36}')], "stop"
    return [{"content": part} for part in ANSWER], "stop"


class ChatNode:
    """Give its `routes` to an application. `respond` may answer instead; `cut_after` breaks a stream off there.

    `model` and `device` are those that its answers name; None: no device.
    """

    def __init__(self):
        self.bodies = []
        self.headers = []
        self.respond = None
        self.cut_after = None
        self.model = WRITER
        self.device = "CPU"

    def routes(self):
        return [web.post("/v1/chat/completions", self._chat), web.post("/tokenize", self._tokenize)]

    async def _chat(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        if self.respond is not None and (scripted := await self.respond(request)) is not None:
            return scripted
        deltas, reason = pieces_of(body)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "X-Model": self.model,
                **({"X-NPU-Node-Device": self.device} if self.device else {}),
                "X-NPU-Node-Route-Reason": "preferred",
                "X-NPU-Node-Token-Count": "7",
            }
        )
        await response.prepare(request)
        events = [chunk([choice({"role": "assistant", "content": ""})])]
        events += [chunk([choice(delta)]) for delta in deltas]
        events.append(chunk([choice({}, reason)]))
        usage = {"prompt_tokens": 7, "completion_tokens": len(deltas), "total_tokens": 7 + len(deltas)}
        events.append(chunk([], usage=usage, npu_busy_delta_us=1234))
        for index, event in enumerate(events):
            event["model"] = self.model
            if index == self.cut_after:
                request.transport.abort()
                return response
            await response.write(data_event(event))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _tokenize(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        if self.respond is not None and (scripted := await self.respond(request)) is not None:
            return scripted
        count = len(json.dumps(body.get("messages") or body["prompt"]))
        return web.json_response({"count": count, "max_model_len": 8192, "tokens": []})
