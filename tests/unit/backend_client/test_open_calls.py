"""Ending a call from outside, and what ends it as well."""

import asyncio
import json

import pytest

from backend_client import RequestRejected
from backend_client.errors import ClientClosed
from backend_client.http.messages import encode_texts
from backend_client.lifetime import OpenCalls


@pytest.fixture
def calls():
    return OpenCalls()


async def waiting(calls, begun):
    async with calls.open():
        begun.set()
        await asyncio.get_running_loop().create_future()


async def begin(calls):
    begun = asyncio.Event()
    task = asyncio.create_task(waiting(calls, begun))
    await begun.wait()
    return task


async def test_closing_ends_a_call_with_its_own_error_alone(calls):
    task = await begin(calls)
    await calls.close()
    with pytest.raises(ClientClosed) as caught:
        await task
    assert caught.value.__suppress_context__
    with pytest.raises(ClientClosed):
        calls.check()


async def test_a_caller_who_cancels_while_the_client_closes_gets_the_cancellation(calls):
    task = await begin(calls)
    task.cancel()
    await calls.close()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_time_limit_around_a_closed_call_still_ends_at_its_time(calls):
    async def limited():
        async with asyncio.timeout(None) as scope:
            async with calls.open():
                scope.reschedule(0)
                await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        await limited()
    await calls.close()


async def test_work_that_fails_by_itself_while_the_client_closes_keeps_its_error(calls):
    begun = asyncio.Event()

    async def failing():
        async with calls.open():
            begun.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                raise ValueError("its own")

    task = asyncio.create_task(failing())
    await begun.wait()
    await calls.close()
    with pytest.raises(ValueError, match="its own"):
        await task
    assert not task.cancelling()


async def test_a_task_goes_on_after_its_call_was_ended(calls):
    begun = asyncio.Event()

    async def work():
        with pytest.raises(ClientClosed):
            await waiting(calls, begun)
        # The cancellation is used up.
        await asyncio.sleep(0)
        return "went on"

    task = asyncio.create_task(work())
    await begun.wait()
    await calls.close()
    assert await task == "went on"


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("model", [None, 'a "quoted" name'])
def test_the_body_of_an_embedding_is_json_of_its_texts(model, truncate):
    texts = ['a "quote"', "tab\t and \x00 and \x7f", "Ärger 😀", "\\", "", "\u2028"]
    expected = {"texts": texts} | ({"model": model} if model else {}) | ({"truncate": True} if truncate else {})
    assert json.loads(encode_texts(texts, model, truncate=truncate)) == expected


def test_a_text_that_is_not_unicode_is_refused_without_being_repeated():
    with pytest.raises(RequestRejected) as caught:
        encode_texts(["\ud800 secret"], None, truncate=False)
    assert "secret" not in repr(caught.value)
    assert caught.value.__context__ is None
