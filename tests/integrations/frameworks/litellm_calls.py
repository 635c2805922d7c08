"""LiteLLM against the node at NODE_URL, through its OpenAI and its Ollama provider. Status 0 if all is right."""

import os

import litellm

URL = os.environ["NODE_URL"]
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
litellm.num_retries = 0

for model, base in (("openai/smollm2", URL + "/v1"), ("ollama_chat/smollm2", URL)):
    common = {"model": model, "api_base": base, "api_key": "unused", "messages": MESSAGES, "max_tokens": 32}
    whole = litellm.completion(**common)
    assert "Paris" in whole.choices[0].message.content, (model, whole)
    assert whole.usage.completion_tokens > 0, (model, whole)
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**common, stream=True)]
    assert "".join(pieces) == whole.choices[0].message.content, (model, pieces)

for model, base in (("openai/all-minilm", URL + "/v1"), ("ollama/all-minilm", URL)):
    vectors = litellm.embedding(model=model, api_base=base, api_key="unused", input=["a text", "another"])
    assert [len(item["embedding"]) for item in vectors.data] == [384, 384], model

try:
    litellm.completion(model="openai/no-such-model", api_base=URL + "/v1", api_key="unused", messages=MESSAGES)
except litellm.NotFoundError:
    print("all as expected")
