"""DSPy: typed predictions by the chat and the JSON adapter, and a ReAct module."""

import os

import dspy

URL, MODEL = os.environ["NODE_URL"], os.environ.get("NODE_MODEL", "smollm2")
lm = dspy.LM(
    f"openai/{MODEL}",
    api_base=URL + "/v1",
    api_key="unused",
    max_tokens=200,
    temperature=0.0,
    cache=False,
    num_retries=0,
)


class Sentiment(dspy.Signature):
    """Tell the sentiment of a sentence."""

    sentence: str = dspy.InputField()
    positive: bool = dspy.OutputField()


def lookup(word: str) -> str:
    """Look a word up."""
    return word


for adapter in (dspy.ChatAdapter(), dspy.JSONAdapter()):
    with dspy.context(lm=lm, adapter=adapter):
        for module in (dspy.Predict(Sentiment), dspy.ReAct("question -> answer", tools=[lookup], max_iters=1)):
            try:
                module(sentence="I like it.") if isinstance(module, dspy.Predict) else module(question="What is a cat?")
            except Exception as error:
                # A small model does not keep the form of the prompt; a refused request would say 400.
                assert "BadRequest" not in repr(error) and "400" not in str(error), error
assert lm("What is the capital of France?")
print("all as expected")
