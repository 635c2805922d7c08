"""The process that converts: reads one job from stdin, writes messages to stdout, one JSON line each.

    python -m worker_node.models.convert

A process of its own because conversion takes gigabytes and imports much, and native code may crash: the
parent stays small and sees a failed conversion, whatever happened."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import msgspec

from worker_node.core.errors import ConversionFailed
from worker_node.models.catalog import SourceFormat
from worker_node.models.convert.job import ConversionJob, Converted, recognised, report
from worker_node.models.directory import (
    MANIFEST_VERSION,
    TOKENIZER_FILE,
    Manifest,
    content_hash,
    sizes,
    write_manifest,
)

_MAKERS = ("openvino", "openvino-genai", "gguf", "safetensors")


def main() -> int:
    """Do the job; 0 when the target is complete."""
    # Native code prints to stdout as it likes: the report gets a descriptor of its own and stdout joins stderr.
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ConversionJob)
    return report(lambda progress: perform(job, progress.stage), channel)


def perform(job: ConversionJob, stage: Callable[[str], None]) -> None:
    """Make the model directory that the job describes. Raises a ModelError."""
    converted = _convert(job, stage)
    if job.kind not in (None, converted.kind):
        raise ConversionFailed(f"{job.id}: the files are a model for {converted.kind}, not for {job.kind}")
    _write_manifest(job, converted)


def _convert(job: ConversionJob, stage: Callable[[str], None]) -> Converted:
    # Each maker imports what it needs: an encoder does not wait for GenAI.
    if job.format is SourceFormat.GGUF:
        from worker_node.models.convert.gguf import convert_gguf  # noqa: PLC0415

        return convert_gguf(job, stage)
    if job.format is SourceFormat.TASK:
        found = recognised(Path(job.source))
        if found is None:
            raise ConversionFailed(f"{job.id}: no task of this node recognises the files any more; try again")
        return found[1].convert(job, stage)
    if job.format is SourceFormat.OPENVINO:
        from worker_node.models.convert.embedding import adopt  # noqa: PLC0415

        return adopt(job, stage)
    from worker_node.models.convert.embedding import convert_encoder  # noqa: PLC0415

    return convert_encoder(job, stage)


def _write_manifest(job: ConversionJob, converted: Converted) -> None:
    target, entry = Path(job.target), job.entry
    limit = converted.context_limit if entry is None else min(converted.context_limit, entry.context_limit)
    write_manifest(
        target,
        Manifest(
            version=MANIFEST_VERSION,
            id=job.id,
            kind=converted.kind,
            family=converted.family if entry is None else entry.family,
            context_limit=limit,
            quantization=converted.quantization,
            licence=job.licence,
            source=job.origin,
            source_sha256=job.source_sha256,
            files=sizes(target),
            made_with={name: metadata.version(name) for name in _MAKERS},
            dimensions=converted.dimensions,
            space=converted.space,
            canary=None if entry is None else entry.canary,
            max_prompt_len=None if entry is None else entry.max_prompt_len,
            aliases=job.aliases,
            prompts=dict(converted.prompts),
            matryoshka=converted.matryoshka,
            content=None if converted.space is None else content_hash(target, TOKENIZER_FILE),
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
