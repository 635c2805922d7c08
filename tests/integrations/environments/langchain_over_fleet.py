"""What langchain-tests runs on: langchain-openai with the SDK clients of this package, over the nodes of the settings.

They run in an environment of their own (langchain.txt); tests/integrations/test_frameworks_over_fleet.py makes it.
"""

import os
from typing import ClassVar

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

import backend_client

ASYNC, BLOCKING = backend_client.openai(), backend_client.sync.openai()
MODEL = os.environ["CHAT_MODEL"]


class TestChat(ChatModelIntegrationTests):
    chat_model_class = ChatOpenAI
    chat_model_params: ClassVar = {
        "model": MODEL,
        "api_key": "unused",
        "client": BLOCKING.chat.completions,
        "async_client": ASYNC.chat.completions,
        "root_client": BLOCKING,
        "root_async_client": ASYNC,
        "stream_usage": True,
    }
    model_override_value = MODEL


class TestEmbeddings(EmbeddingsIntegrationTests):
    embeddings_class = OpenAIEmbeddings
    embedding_model_params: ClassVar = {
        "model": os.environ["EMBEDDING_MODEL"],
        "api_key": "unused",
        "client": BLOCKING.embeddings,
        "async_client": ASYNC.embeddings,
        "check_embedding_ctx_length": False,
    }
