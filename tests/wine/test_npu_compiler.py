"""Everything that a node sends to an NPU compiles for each generation, no slower and no larger than it did."""

import pytest

from tests.wine.npu_compiler import EMBEDDER, ROWS, SMALL, compile_row, differences, model_store, read_known
from tests.wine.windows import windows, windows_path
from worker_node.devices.blobs import read_record

CASES = [
    *((row, SMALL) for row in ROWS if row.small),
    *(
        pytest.param(row, (name,), marks=pytest.mark.long)
        for row in ROWS
        for name in row.platforms
        if not (row.small and name in SMALL)
    ),
]


@pytest.fixture(scope="session")
def installation():
    return windows()


@pytest.mark.timeout(4000)
@pytest.mark.parametrize(("row", "platforms"), CASES, ids=lambda value: getattr(value, "name", "") or " ".join(value))
def test_what_a_node_sends_compiles_as_well_as_it_did(installation, row, platforms):
    found = compile_row(installation, row, platforms)
    known = read_known().get(row.name, {})
    worse = {name: differences(row.name, known.get(name), result) for name, result in found.items()}
    assert not any(worse.values()), worse


@pytest.mark.timeout(600)
def test_a_machine_without_an_npu_compiles_for_one_and_does_not_call_it_proven(installation, tmp_path):
    settings = tmp_path / "node.toml"
    settings.write_text(f'[[models]]\nname = "{EMBEDDER}"\nnpu_buckets = [32]\n')
    store, out = windows_path(model_store()), windows_path(tmp_path / "blobs")
    command = ["-m", "worker_node", "compile", EMBEDDER, "--platform", "4000", "--out", out]
    done = installation.run(*command, "--config", windows_path(settings), "--model-store", store)
    assert "NOT PROVEN: no NPU 4000 has run it" in done.stdout, done.stdout
    record = read_record(tmp_path / "blobs")
    assert (record.proven, record.origin["architecture"], record.origin["driver"]) == (False, "4000", None)
    assert "npu=4000" in record.requirements["32-tokens.blob"]
    # The weights, 45 MB, are left out.
    assert (tmp_path / "blobs" / "32-tokens.blob").stat().st_size < 3e6
