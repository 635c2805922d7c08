"""LlamaIndex over the SDK clients of this package: chat, streams, completion and embeddings, blocking and awaited."""

import asyncio
import os

from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

import backend_client

ROUNDS = int(os.environ["ROUNDS"])
question = [ChatMessage(role="user", content="Name an album by Queen.")]


async def main():
    openai, blocking = backend_client.openai(), backend_client.sync.openai()
    llm = OpenAILike(
        openai_client=blocking,
        async_openai_client=openai,
        model=os.environ["CHAT_MODEL"],
        is_chat_model=True,
        context_window=2048,
        max_tokens=32,
        max_retries=0,
    )
    # This class makes its SDK clients itself, and takes what they send with.
    vectors = OpenAILikeEmbedding(
        api_base=str(openai.base_url),
        api_key="unused",
        http_client=blocking._client,
        async_http_client=openai._client,
        model_name=os.environ["EMBEDDING_MODEL"],
        max_retries=0,
    )
    for _ in range(ROUNDS):
        assert llm.chat(question).message.content
        assert list(llm.stream_chat(question))
        answers = await asyncio.gather(*(llm.achat(question) for _ in range(3)))
        assert all(answer.message.content for answer in answers)
        pieces = [piece async for piece in await llm.astream_chat(question)]
        assert pieces
        assert vectors.get_text_embedding("a text")
        assert vectors.get_text_embedding("a text") == await vectors.aget_text_embedding("a text")
        assert len(await vectors.aget_text_embedding_batch(["a text", "another"])) == 2
    await openai.close()
    blocking.close()


asyncio.run(main())
print("all as expected")
