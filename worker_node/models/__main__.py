"""The processes that work on models, which report in lines of JSON on stdout (`pull.report`).

python -m worker_node.models pull ROOT NAME
python -m worker_node.models convert          reads its job from stdin
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from worker_node.models.convert.job import ConversionJob, perform
from worker_node.models.pull import report
from worker_node.models.store import ModelStore


def main() -> int:
    # Native code prints to stdout as it likes: the report gets a descriptor of its own and stdout joins stderr.
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if sys.argv[1] == "pull":
        return report(lambda progress: ModelStore(Path(sys.argv[2])).pull(sys.argv[3], progress), channel)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ConversionJob)
    return report(lambda progress: perform(job, progress.stage), channel)


if __name__ == "__main__":
    sys.exit(main())
