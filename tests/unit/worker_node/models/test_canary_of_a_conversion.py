"""A generation model that misses its canary after conversion is refused with what it answered."""

from types import SimpleNamespace

import pytest

from worker_node.core.errors import ConversionFailed
from worker_node.models.convert import generation
from worker_node.models.directory import GenerationCanary

CANARY = GenerationCanary("What is the capital of France?", ("Paris",), 24)


@pytest.fixture
def answering(monkeypatch):
    """A function that scripts the answer of the converted model."""

    def script(answer):
        pipeline = SimpleNamespace(
            get_generation_config=SimpleNamespace, generate=lambda _prompts, _config: SimpleNamespace(texts=[answer])
        )
        monkeypatch.setattr(generation.openvino_genai, "LLMPipeline", lambda *_: pipeline)

    return script


def test_the_error_quotes_the_answer_and_names_the_next_step(answering, tmp_path):
    answering("L'Étoile, la Marseillaise, " + "la femme, " * 100)
    with pytest.raises(ConversionFailed) as refused:
        generation._expect_answer("small-int8_sym", tmp_path, CANARY)
    message = str(refused.value)
    assert message.startswith("small-int8_sym: asked 'What is the capital of France?', the converted model answered ")
    assert "L'Étoile" in message
    assert message.endswith("without Paris; a node would not serve it. Choose another quantization")
    assert len(message) < 300


def test_the_expected_answer_is_accepted(answering, tmp_path):
    answering("The capital of France is Paris.")
    generation._expect_answer("small", tmp_path, CANARY)
