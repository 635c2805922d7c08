"""A row that takes down the engine of a real node is found and rejected, without a probe: the node refuses it."""

from array import array
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend_client.bulk import BulkRequest, ExitCode, run_job
from backend_client.settings import ClientSettings
from tests.faults.bulk.data_sets import rejections_of, rows_of
from tests.faults.engines.test_engine_faults import QUICK, no_canary
from tests.support import scripted_runner
from tests.support.scripted_runner import ScriptedRunner, die
from worker_node.app import make_app
from worker_node.core.types import Device, ModelKind
from worker_node.engines.process import EngineLimits
from worker_node.engines.protocol import EngineSpec
from worker_node.engines.supervisor import SupervisedEngine
from worker_node.server import Profile, configured_models, running_node
from worker_node.settings import ModelSettings, NodeSettings

EMBEDDER = "all-minilm-l6-v2"
SETTINGS = NodeSettings(port=0, models=(ModelSettings(name=EMBEDDER, placements=("CPU",)),))
# Of a word that the model's vocabulary has as one token.
WORD, TOKEN = "volcano", 12779
GOOD = "a good row"


class FragileRunner(ScriptedRunner):
    """Dies of every job in which the word is. Its vectors are as long as the model's."""

    def load(self):
        scripted_runner.DIMENSIONS = 384
        return super().load()

    def submit(self, job):
        if TOKEN in array("i", job.tokens):
            die()
        super().submit(job)


def fragile_models(machine):
    [model] = configured_models(machine)
    spec = EngineSpec(EMBEDDER, ModelKind.EMBEDDING, "/", Device.CPU, f"{__name__}:FragileRunner", {})
    [placement] = model.placements
    limits = EngineLimits(restart=QUICK)
    engine = SupervisedEngine(spec, no_canary, limits, lazy=True, suspects=placement.suspects)
    return [replace(model, placements=(replace(placement, engine=engine),))]


@pytest.mark.usefixtures("store")
async def test_a_row_that_kills_its_engine_is_rejected_and_the_one_beside_it_is_served(tmp_path):
    pq.write_table(pa.table({"text": [GOOD, f"the {WORD} erupts"]}), tmp_path / "in.parquet")
    request = BulkRequest(
        kind="embed",
        source=str(tmp_path / "in.parquet"),
        out=str(tmp_path / "out"),
        column="text",
        max_rejected=0.5,
    )
    async with running_node(SETTINGS, Profile(fragile_models, make_app)) as (_, url):
        report = await run_job(request, ClientSettings.load(nodes=[url]))
    assert (report.exit_code, report.rows, report.rejected) == (ExitCode.COMPLETE, 1, 1)
    assert set(rows_of(tmp_path / "out")) == {GOOD}
    assert rejections_of(tmp_path / "out") == {("in.parquet", 1): "takes down the engine that runs it"}
