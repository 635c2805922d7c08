"""Published files of this task: a directory with `vowels.json`."""

import json
import shutil
from pathlib import Path

from counting_task.task import KIND
from worker_node.core.errors import ConversionFailed
from worker_node.models.convert.job import Converted, ModelFiles


class _Files(ModelFiles):
    def recognises(self, source):
        return (source / "vowels.json").is_file()

    def weights(self, source):
        return [source / "vowels.json"]

    def convert(self, job, stage):
        stage("reading the vowels")
        source = Path(job.source) / "vowels.json"
        if not json.loads(source.read_text()).get("vowels"):
            raise ConversionFailed(f"{source}: vowels is missing or empty")
        shutil.copyfile(source, Path(job.target) / source.name)
        return Converted(kind=KIND, family="counting", quantization="none", context_limit=64)


FILES = _Files()
