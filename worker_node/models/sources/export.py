"""The command that makes a usable model of one that cannot be converted here."""

from __future__ import annotations


def export_command(repo: str, directory: str, *, encoder: bool = False) -> str:
    """A shell line: optimum-intel in an environment of its own (it brings torch), then the pull of its result.

    The options for generation models are those that run on NPUs: int4, symmetric, groups of 128.
    """
    options = (
        "--task feature-extraction --library sentence_transformers"
        if encoder
        else "--task text-generation-with-past --weight-format int4 --sym --ratio 1.0 --group-size 128"
    )
    return (
        "python3 -m venv export-env && export-env/bin/pip install 'optimum-intel[openvino]' && "
        f"export-env/bin/optimum-cli export openvino --model {repo} {options} ./{directory} && "
        f"npu-node pull ./{directory}"
    )
