"""Schemas of requests to grammars, in preparation processes, with a cache. Small schemas never wait for large ones."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence

from msgspec import structs

from worker_node.core.errors import BadRequest, DeadlineExceeded
from worker_node.sandbox.pool import PreparationLimits, PreparationPool, ResultCache, encoded
from worker_node.structured_output.cost import MAX_SCHEMA_BYTES
from worker_node.structured_output.form import CallForm, Compiled, Form, FormPart, GivenText, compile_form
from worker_node.tasks.generate.request import GenerationRequest
from worker_node.tasks.generate.tool_calls import CLOSING, HERMES, OPENING, TOOL_FORMATS

# Small schemas are almost all there are, and have a process of their own. `cpu_s` bounds the time of one schema.
SMALL_BYTES = 4096
_CACHE_BYTES = 16 * 1024 * 1024
_SMALL = PreparationLimits(processes=1, cpu_s=1.0)
_LARGE = PreparationLimits(processes=2, cpu_s=5.0)
_MODULES = ("worker_node.structured_output.form",)


class SchemaCompiler:
    """Compiles the schemas that answers must match, until `close`."""

    def __init__(self) -> None:
        self._small = PreparationPool(_SMALL, _MODULES)
        self._large = PreparationPool(_LARGE, _MODULES)
        self.cache = ResultCache(_CACHE_BYTES)

    async def start(self) -> None:
        """Start the process of small schemas; those of large ones start when the first large schema comes."""
        await self._small.start()

    async def close(self) -> None:
        await asyncio.gather(self._small.close(), self._large.close())

    async def grammar(self, form: Form, deadline: float) -> tuple[str | None, Sequence[str]]:
        """The grammar of a form of answers, and the places in the request that it does not enforce.

        None for text with calls whose schemas are over a bound: it is left free. `deadline` is monotonic seconds.
        Raises BadRequest for a schema that is invalid, cannot be enforced or is over a bound; Overloaded,
        DeadlineExceeded, EngineUnavailable.
        """
        try:
            compiled = await self._grammar(form, deadline)
        except BadRequest:
            if form.calls is None or not form.calls.optional:
                raise
            return None, (form.where,)
        return compiled.grammar, compiled.dropped

    async def _grammar(self, form: Form, deadline: float) -> Compiled:
        where = form.where
        data = encoded(form, where)
        if len(data) > MAX_SCHEMA_BYTES:
            raise BadRequest.at(where, f"the schema has {len(data)} bytes, the bound here is {MAX_SCHEMA_BYTES}")
        pool = self._small if len(data) <= SMALL_BYTES else self._large

        async def compiled() -> str:
            # Each caller has a deadline of its own; the work goes on for the next one, within its CPU time.
            grammar: str = await pool.run(compile_form, form, deadline=time.monotonic() + 600, param=where)
            return grammar

        key = hashlib.blake2b(data, digest_size=32).digest()
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                return Compiled.read(await self.cache.get(key, compiled))
        except TimeoutError:
            raise DeadlineExceeded(f"the deadline passed while {where} was compiled", param=where) from None


def answer_form(family: str, request: GenerationRequest) -> Form | None:
    """A forced call, JSON that matches a schema, either of calls and that JSON, text with calls in it, or a text of a
    form that the caller gave; None where none counts.

    Calls are written as that family of models writes them.
    """
    wanted, use = request.grammar, request.tool_use
    if isinstance(wanted, GivenText) and not (use is not None and use.forced):
        return Form(text=wanted)
    answer = wanted if isinstance(wanted, FormPart) else None
    if use is None or not isinstance(request.prompt, tuple):
        return None if answer is None else Form(answer)
    form, tags = TOOL_FORMATS.get(family, HERMES), (OPENING, CLOSING)
    parts = {tool.name: FormPart(tool.parameters, tool.path, tool.strict) for tool in use.tools}
    if use.forced:
        return Form(calls=CallForm(parts, form.arguments))
    if answer is not None:
        form = form.beside_json
        return Form(answer, CallForm(parts, form.arguments, tags, form.listed, not use.single))
    if request.grammar is not None or request.sampling.min_tokens or request.sampling.ignore_eos:
        return None  # after a call there may be nothing to write but the end
    parts = {name: structs.replace(part, strict=False) for name, part in parts.items()}
    around = tags if form.opening else None
    return Form(calls=CallForm(parts, form.arguments, around, form.listed, not use.single, optional=True))
