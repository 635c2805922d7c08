"""Which processes compile schemas, and when they start."""

import asyncio
import time

import pytest

from worker_node.core.errors import BadRequest, DeadlineExceeded
from worker_node.structured_output.form import CallForm, Form, FormPart
from worker_node.tasks.generate.schemas import SMALL_BYTES, SchemaCompiler

LARGE = {"enum": [f"{number}{0:064}" for number in range(SMALL_BYTES // 64 + 1)]}


async def test_the_processes_of_large_schemas_start_with_the_first_large_schema():
    compiler = SchemaCompiler()
    small, large = compiler._small, compiler._large
    deadline = time.monotonic() + 60
    try:
        await compiler.start()
        assert (len(small.pids), len(large.pids)) == (1, 0)
        assert "true" in (await compiler.grammar(Form(FormPart({"const": True}, "schema")), deadline))[0]
        assert not large.pids
        assert "0" * 60 in (await compiler.grammar(Form(FormPart(LARGE, "schema")), deadline))[0]
        assert len(large.pids) == 1
    finally:
        await compiler.close()
    assert not small.pids | large.pids


async def test_optional_tools_beyond_the_bounds_together_leave_the_answer_free():
    texts = {f"t{length}": {"type": "string", "maxLength": length} for length in range(20, 300, 2)}
    tools = {name: FormPart({"type": "object", "properties": texts}, f"tools.{name}") for name in ("a", "b")}
    compiler, deadline = SchemaCompiler(), time.monotonic() + 60
    try:
        free = await compiler.grammar(Form(calls=CallForm(tools, "arguments", optional=True)), deadline)
        assert free == (None, ("tools",))
        with pytest.raises(BadRequest):
            await compiler.grammar(Form(calls=CallForm(tools, "arguments")), deadline)
    finally:
        await compiler.close()


async def test_a_caller_whose_deadline_passes_ends_no_compilation_that_another_waits_for():
    compiler, form = SchemaCompiler(), Form(FormPart({"const": True}, "schema"))
    try:
        now = time.monotonic()
        late, patient = await asyncio.gather(
            *(compiler.grammar(form, deadline) for deadline in (now, now + 60)), return_exceptions=True
        )
        assert isinstance(late, DeadlineExceeded)
        assert "true" in patient[0]
    finally:
        await compiler.close()
