"""The first bytes of a GGUF file tell enough to reject it."""

import gguf
import pytest

from worker_node.core.errors import SourceRejected
from worker_node.models.sources.selection import HEADER_BYTES, parse_header, require_known_architecture


def test_the_header_is_read_as_the_gguf_library_wrote_it(make_gguf):
    path = make_gguf()
    header = parse_header(path.read_bytes()[:HEADER_BYTES], "m")
    expected = {
        name: field.contents() for name, field in gguf.GGUFReader(path).fields.items() if name.startswith("llama.")
    }
    assert {name: value for name, value in header.fields.items() if name.startswith("llama.")} == expected
    assert (header.architecture, header.number("block_count"), header.number("nothing")) == ("llama", 2, None)


def test_a_header_that_is_cut_off_anywhere_gives_what_precedes_it(make_gguf):
    data = make_gguf().read_bytes()
    whole = parse_header(data[:HEADER_BYTES], "m").fields
    for length in range(24, 1500, 7):
        fields = parse_header(data[:length], "m").fields
        assert fields.items() <= whole.items()


@pytest.mark.parametrize("head", [b"", b"GGUF", b"PK" + bytes(60), b"GGUF" + bytes([9]) + bytes(60)])
def test_what_is_no_gguf_file_is_rejected_by_name(head):
    with pytest.raises(SourceRejected, match=r"x\.gguf"):
        parse_header(head, "x.gguf")


@pytest.mark.parametrize("kind", range(16))
def test_hostile_lengths_and_types_are_survived(kind):
    key = (20).to_bytes(8, "little") + b"general.architecture"
    for length in (0, 1, 2**31, 2**63, 2**64 - 1):
        head = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (2**64 - 1).to_bytes(8, "little") + key
        head += kind.to_bytes(4, "little") + (9).to_bytes(4, "little") + length.to_bytes(8, "little") + bytes(40)
        parse_header(head, "x.gguf")


def test_only_architectures_with_a_graph_are_accepted():
    require_known_architecture("qwen3", "x")
    with pytest.raises(SourceRejected, match=r"'gemma3'; those that can be converted are llama, qwen2, qwen3"):
        require_known_architecture("gemma3", "x")
