"""Both published forms of a vocabulary give the same tokens."""

import base64
import json

import pytest

from worker_node.core.errors import ConversionFailed
from worker_node.models.convert.whisper import alignment_heads, read_tiktoken, read_tokenizer_json
from worker_node.models.convert.whisper_network import Dimensions

# All bytes, a few merges; " -", "♪" and the like are what suppression looks up.
MERGES = [
    (b"h", b"e"),
    (b"l", b"l"),
    (b"he", b"ll"),
    (b" ", b"-"),
    (b" ", b"'"),
    (b" ", b"("),
    (b" ", b"\xe2"),
    (b"\xe2", b"\x99"),
    (b"hell", b"o"),
]


@pytest.fixture
def tiktoken(tmp_path):
    tokens = [*(bytes([byte]) for byte in range(256)), *(left + right for left, right in MERGES)]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    path = tmp_path / "gpt2.tiktoken"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_tokens_merges_and_control_tokens_of_a_tiktoken_file(tiktoken):
    vocabulary = read_tiktoken(tiktoken, languages=2)
    assert vocabulary.merges == MERGES
    assert vocabulary.end == 256 + len(MERGES)
    assert vocabulary.languages() == {"<|en|>": vocabulary.end + 2, "<|zh|>": vocabulary.end + 3}
    assert vocabulary.tokens[vocabulary.id_of("<|0.00|>")] == b"<|0.00|>"
    assert vocabulary.id_of("<|30.00|>") == len(vocabulary.tokens) - 1


def test_annotations_and_control_tokens_are_suppressed_and_speech_is_not(tiktoken):
    vocabulary = read_tiktoken(tiktoken, languages=2)
    suppressed = vocabulary.suppressed()
    for text in (b"(", b" (", b" -", b"[", b"\xe2\x99"):
        assert vocabulary.tokens.index(text) in suppressed
    for text in (b"-", b"'", b",", b"hello", b" "):
        assert vocabulary.tokens.index(text) not in suppressed
    assert {vocabulary.no_speech, vocabulary.id_of("<|translate|>")} <= set(suppressed)
    assert vocabulary.end not in suppressed
    assert vocabulary.suppressed_at_begin() == [vocabulary.tokens.index(b" "), vocabulary.end]


def test_a_tokenizer_json_gives_the_same_tokens(tiktoken, tmp_path):
    expected = read_tiktoken(tiktoken, languages=2)
    spelling = {b" ": "Ġ", b"\xe2": "â", b"\x99": "Ļ"}
    text = {**{bytes([b]): _spelled(b) for b in range(256)}, **spelling}
    words = {
        "".join(text[bytes([byte])] for byte in token): place
        for place, token in enumerate(expected.tokens)
        if place < expected.end
    }
    pairs = [["".join(text[bytes([byte])] for byte in side) for side in pair] for pair in MERGES]
    content = {
        "model": {"type": "BPE", "vocab": words, "merges": [" ".join(pair) for pair in pairs]},
        "added_tokens": [{"content": name, "id": place} for name, place in expected.special.items()],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    found = read_tokenizer_json(tmp_path / "tokenizer.json")
    assert (found.tokens, found.merges, found.special) == (expected.tokens, expected.merges, expected.special)


def test_damaged_vocabularies_are_rejected(tmp_path):
    (tmp_path / "a.tiktoken").write_text("!!! 0\n")
    with pytest.raises(ConversionFailed, match="not a readable list of tokens"):
        read_tiktoken(tmp_path / "a.tiktoken", 2)
    (tmp_path / "b.tiktoken").write_text("YQ== 0\nYg== 2\n")
    with pytest.raises(ConversionFailed, match="gaps"):
        read_tiktoken(tmp_path / "b.tiktoken", 2)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ConversionFailed, match="tokenizer of the Whisper family"):
        read_tokenizer_json(tmp_path / "tokenizer.json")


def test_alignment_heads_of_tiny_en_are_those_published_and_unknown_sizes_use_the_upper_layers():
    tiny = Dimensions(80, 1500, 384, 6, 4, 51864, 448, 384, 6, 4)
    # From the model's generation_config.json on its hub page.
    assert alignment_heads(tiny) == [[1, 0], [2, 0], [2, 5], [3, 0], [3, 1], [3, 2], [3, 3], [3, 4]]
    unknown = Dimensions(80, 1500, 16, 2, 4, 51864, 448, 16, 2, 4)
    assert alignment_heads(unknown) == [[2, 0], [2, 1], [3, 0], [3, 1]]


def _spelled(byte):
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))
