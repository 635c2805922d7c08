"""The vocabulary of English-only models, and what their configuration says."""

import base64

import pytest

from worker_node.core.errors import ConversionFailed
from worker_node.models.convert.whisper import Dimensions, alignment_heads, read_tiktoken

MERGES = [(b"h", b"e"), (b"l", b"l"), (b"he", b"ll"), (b" ", b"-"), (b"hell", b"o")]


@pytest.fixture
def tiktoken(tmp_path):
    tokens = [*(bytes([byte]) for byte in range(256)), *(left + right for left, right in MERGES)]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    path = tmp_path / "gpt2.tiktoken"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_tokens_merges_and_control_tokens_of_a_tiktoken_file(tiktoken):
    vocabulary = read_tiktoken(tiktoken)
    assert vocabulary.merges == MERGES
    assert vocabulary.end == 256 + len(MERGES)
    assert vocabulary.special["<|zh|>"] == vocabulary.end + 3
    assert vocabulary.tokens[vocabulary.special["<|0.00|>"]] == b"<|0.00|>"
    assert vocabulary.special["<|30.00|>"] == len(vocabulary.tokens) - 1


def test_damaged_vocabularies_are_rejected(tmp_path):
    (tmp_path / "a.tiktoken").write_text("!!! 0\n")
    with pytest.raises(ConversionFailed, match="not a readable list of tokens"):
        read_tiktoken(tmp_path / "a.tiktoken")
    (tmp_path / "b.tiktoken").write_text("YQ== 0\nYg== 2\n")
    with pytest.raises(ConversionFailed, match="gaps"):
        read_tiktoken(tmp_path / "b.tiktoken")


def test_alignment_heads_of_tiny_en_are_those_published_and_unknown_sizes_use_the_upper_layers():
    tiny = Dimensions(80, 1500, 384, 6, 4, 51864, 448, 384, 6, 4)
    # From the model's generation_config.json on its hub page.
    assert alignment_heads(tiny) == [[1, 0], [2, 0], [2, 5], [3, 0], [3, 1], [3, 2], [3, 3], [3, 4]]
    unknown = Dimensions(80, 1500, 16, 2, 4, 51864, 448, 16, 2, 4)
    assert alignment_heads(unknown) == [[2, 0], [2, 1], [3, 0], [3, 1]]
