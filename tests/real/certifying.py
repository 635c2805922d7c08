"""Certifications by `npu-node certify`, in this process, on emulated NPUs in short shapes."""

import contextlib
import dataclasses
import io
import json

import pytest

from tests.support.whisper import MODEL as WHISPER
from worker_node.certify.checks import QUICK
from worker_node.cli.main import main

EMBEDDER, WRITER = "all-minilm-l6-v2", "smollm2-135m-instruct"
AGREEMENT = "agreement with the CPU"
# What --quick examines here; each prompt takes half a second, on the emulated NPU and for the reference.
BRIEF = dataclasses.replace(QUICK, prompts=3, texts=12)


def emulated_settings(directory):
    """The file with the settings of a node; its passports are in this directory."""
    config = directory / "node.toml"
    config.write_text(
        f'passports = "{directory}/passports"\nnpu_emulation = true\ncrash_limit = 2\n'
        f'[[models]]\nname = "{EMBEDDER}"\nnpu_buckets = [32]\nplacements = ["NPU"]\n'
        f'[[models]]\nname = "{WRITER}"\nmax_prompt_len = 160\nmin_response_len = 32\nplacements = ["NPU"]\n'
        f'[[models]]\nname = "{WHISPER}"\nplacements = ["NPU"]\n'
    )
    return config


def run(*words, status=0, quick=BRIEF, **variables):
    """What a command prints."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr("worker_node.certify.checks.QUICK", quick)
        for name, value in variables.items():
            patch.setenv(name, value)
        assert main([str(word) for word in words]) == status, out.getvalue()
    return out.getvalue()


def passport_of(out, model, what="passport"):
    found = json.loads((out / f"{model}.NPU-emulated.{what}.json").read_text())
    return found, {check["name"]: check for check in found["checks"]}


def only(*names):
    return [word for name in names for word in ("--check", name)]
