"""A checkpoint is read without running what it says; its vocabulary gets the merges of byte-pair encoding."""

import base64
import io
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import fields
from typing import ClassVar

import numpy as np
import pytest

from worker_node.core.errors import ConversionFailed
from worker_node.models.convert.whisper import Dimensions, read_checkpoint, read_tiktoken

SIZES = {field.name: number for number, field in enumerate(fields(Dimensions), 3)}


class _Global:
    """Pickles as a reference to `module.name`, called with arguments."""

    def __init__(self, module, name, arguments=None):
        self.reference, self.arguments = f"c{module}\n{name}\n".encode(), arguments


class _Storage:
    def __init__(self, key, values):
        self.key, self.values = key, values


class _Pickler(pickle._Pickler):  # the Python form, whose dispatch can be extended
    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def persistent_id(self, value):
        if isinstance(value, _Storage):
            kind = "FloatStorage" if value.values.dtype == np.float32 else "HalfStorage"
            return ("storage", _Global("torch", kind), value.key, "cpu", value.values.size)
        return None

    def save_global_reference(self, value):
        self.write(value.reference)
        if value.arguments is not None:
            self.save(value.arguments)
            self.write(pickle.REDUCE)

    dispatch[_Global] = save_global_reference


def write_checkpoint(path, content, storages=()):
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(content)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", stream.getvalue())
        for storage in storages:
            archive.writestr(f"archive/data/{storage.key}", storage.values.tobytes())
    return path


def tensor(storage, offset, size, stride):
    return _Global("torch._utils", "_rebuild_tensor_v2", (storage, offset, size, stride, False, OrderedDict()))


def test_sizes_and_tensors_are_read_through_their_strides(tmp_path):
    half = _Storage("0", np.arange(7, dtype=np.float16))
    full = _Storage("1", np.array([0.5], dtype=np.float32))
    state = OrderedDict(a=tensor(half, 1, (3, 2), (1, 3)), b=tensor(full, 0, (), ()))
    path = write_checkpoint(tmp_path / "m.pt", {"dims": SIZES, "model_state_dict": state}, [half, full])
    sizes, tensors = read_checkpoint(path)
    assert sizes == Dimensions(**SIZES)
    assert np.array_equal(tensors["a"], np.arange(1, 7, dtype=np.float32).reshape(2, 3).T)
    assert tensors["b"] == np.float32(0.5)


def test_a_checkpoint_that_refers_to_code_is_rejected_and_runs_nothing(tmp_path):
    witness = tmp_path / "ran"
    content = {"dims": SIZES, "model_state_dict": _Global("os", "mkdir", (str(witness),))}
    with pytest.raises(ConversionFailed, match=r"refers to os\.mkdir"):
        read_checkpoint(write_checkpoint(tmp_path / "m.pt", content))
    assert not witness.exists()


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
