"""What langchain-tests runs on: langchain-openai and langchain-ollama, against the node at NODE_URL.

They run in an environment of their own (langchain.txt); tests/integrations/test_langchain.py makes it, and says
which of them are left out and why.
"""

import os
from typing import ClassVar

from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

URL = os.environ["NODE_URL"]
# Another name for the same model, so that a test sees which of the two was asked for.
MODEL_ID = "smollm2-135m-instruct"


class TestOpenAIChat(ChatModelIntegrationTests):
    chat_model_class = ChatOpenAI
    chat_model_params: ClassVar = {
        "model": "smollm2",
        "base_url": URL + "/v1",
        "api_key": "unused",
        "max_retries": 0,
        "max_tokens": 128,
        # Against loops: greedily, so small a model may fill a free string with one clause until its tokens are spent.
        "frequency_penalty": 0.6,
        "stream_usage": True,
    }
    model_override_value = MODEL_ID


class TestOllamaChat(ChatModelIntegrationTests):
    chat_model_class = ChatOllama
    chat_model_params: ClassVar = {"model": "smollm2", "base_url": URL, "num_predict": 128}
    model_override_value = MODEL_ID
    # Ollama's API has none: langchain-ollama takes the argument and drops it.
    has_tool_choice = False


class TestOpenAIEmbeddings(EmbeddingsIntegrationTests):
    embeddings_class = OpenAIEmbeddings
    embedding_model_params: ClassVar = {
        "model": "all-minilm",
        "base_url": URL + "/v1",
        "api_key": "unused",
        "check_embedding_ctx_length": False,
    }


class TestOllamaEmbeddings(EmbeddingsIntegrationTests):
    embeddings_class = OllamaEmbeddings
    embedding_model_params: ClassVar = {"model": "all-minilm", "base_url": URL}
