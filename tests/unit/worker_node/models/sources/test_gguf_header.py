"""The first bytes of a GGUF file tell enough to reject it."""

import gguf
import pytest

from worker_node.core.errors import SourceRejected
from worker_node.models.sources.selection import require_gguf, require_known_architecture


def test_the_architecture_is_read_as_the_gguf_library_wrote_it(make_gguf):
    path = make_gguf()
    assert gguf.GGUFReader(path).fields["general.architecture"].contents() == "llama"
    require_gguf(path)


@pytest.mark.parametrize("head", [b"", b"GGU", b"PK" + bytes(60)])
def test_what_is_no_gguf_file_is_rejected_by_name(tmp_path, head):
    (tmp_path / "x.gguf").write_bytes(head)
    with pytest.raises(SourceRejected, match=r"x\.gguf is not a GGUF file"):
        require_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize("rest", [b"", b"general.architecture", b"general.architecture\x08\0\0\0\xff" + bytes(7)])
def test_a_header_that_is_cut_off_names_no_architecture(tmp_path, rest):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + rest)
    with pytest.raises(SourceRejected, match=r"x\.gguf is a GGUF file of architecture 'unknown'"):
        require_gguf(tmp_path / "x.gguf")


def test_only_architectures_with_a_graph_are_accepted():
    require_known_architecture("qwen3", "x")
    with pytest.raises(SourceRejected, match=r"'gemma3'; those that can be converted are llama, qwen2, qwen3"):
        require_known_architecture("gemma3", "x")
