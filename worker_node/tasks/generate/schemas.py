"""Schemas of requests to grammars, in preparation processes, with a cache. Small schemas never wait for large ones."""

from __future__ import annotations

import asyncio
import hashlib
import time

import msgspec

from worker_node.core.errors import BadRequest, DeadlineExceeded
from worker_node.core.types import RequestContext
from worker_node.sandbox.pool import PreparationLimits, PreparationPool, ResultCache
from worker_node.settings import NodeSettings
from worker_node.structured_output.cost import MAX_SCHEMA_BYTES
from worker_node.structured_output.form import Compiled, Form, compile_form

# Small schemas are almost all there are, and have a process of their own. `cpu_s` bounds the time of one schema.
SMALL_BYTES = 4096
_CACHE_BYTES = 16 * 1024 * 1024
_SMALL = PreparationLimits(processes=1, cpu_s=1.0)
_LARGE = PreparationLimits(processes=2, cpu_s=5.0)
_MODULES = ("worker_node.structured_output.form",)

_encoder = msgspec.msgpack.Encoder()


class SchemaCompiler:
    """Compiles the schemas that answers must match, until `close`."""

    def __init__(self, small: PreparationPool | None = None, large: PreparationPool | None = None) -> None:
        self._small = small or PreparationPool(_SMALL, _MODULES)
        self._large = large or PreparationPool(_LARGE, _MODULES)
        self.cache = ResultCache(_CACHE_BYTES)

    async def start(self) -> None:
        """Start the process of small schemas; those of large ones start when the first large schema comes."""
        await self._small.start()

    async def close(self) -> None:
        """End the processes."""
        await asyncio.gather(self._small.close(), self._large.close())

    async def grammar(self, form: Form, context: RequestContext) -> str | None:
        """The grammar of a form of answers, within the deadline; the keywords that were dropped are noted as ignored.

        None for text with calls whose schemas are over a bound: it is left free, and that is noted too.
        Raises BadRequest for a schema that is invalid, cannot be enforced or is over a bound; Overloaded,
        DeadlineExceeded, EngineUnavailable.
        """
        try:
            return await self._grammar(form, context)
        except BadRequest:
            if form.calls is None or not form.calls.optional:
                raise
            context.note_ignored(form.where)
            return None

    async def _grammar(self, form: Form, context: RequestContext) -> str:
        where = form.where
        try:
            data = _encoder.encode(form)
        except (ValueError, OverflowError, RecursionError):
            raise BadRequest(f"{where}: a number in it is too large, or it is nested too deeply", param=where) from None
        if len(data) > MAX_SCHEMA_BYTES:
            raise BadRequest(
                f"{where}: the schema has {len(data)} bytes, the bound here is {MAX_SCHEMA_BYTES}", param=where
            )
        key = hashlib.blake2b(data, digest_size=32).digest()
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + context.deadline - time.monotonic()):
                text = await self.cache.get(key, lambda: self._compiled(form, small=len(data) <= SMALL_BYTES))
        except TimeoutError:
            raise DeadlineExceeded(f"the deadline passed while {where} was compiled", param=where) from None
        compiled = Compiled.read(text)
        for place in compiled.dropped:
            context.note_ignored(place)
        return compiled.grammar

    async def _compiled(self, form: Form, *, small: bool) -> str:
        # Each caller has a deadline of its own; the work goes on without them, for the next one, within its CPU time.
        deadline = time.monotonic() + 600
        pool = self._small if small else self._large
        grammar: str = await pool.run(compile_form, form, deadline=deadline, param=form.where)
        return grammar


def schema_compiler(_settings: NodeSettings) -> SchemaCompiler:
    """The compiler of a node."""
    return SchemaCompiler()
