"""Everything that a node sends to an NPU compiles for each generation, no slower and no larger than it did."""

import msgspec
import pytest

from tests.wine.npu_compiler import (
    EMBEDDER,
    KNOWN,
    PAGE,
    ROWS,
    SMALL,
    Result,
    differences,
    model_store,
    read_known,
    result_of,
    table,
)
from tests.wine.windows import windows, windows_path
from worker_node.devices.blobs import read_record

CASES = [(row, platform) for row in ROWS for platform in row.platforms]


@pytest.fixture(scope="session")
def installation():
    return windows()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("row", "platform"),
    [
        pytest.param(
            row,
            platform,
            id=f"{row.name} on {platform}",
            marks=() if row.small and platform in SMALL else pytest.mark.long,
        )
        for row, platform in CASES
    ],
)
def test_what_a_node_sends_compiles_as_well_as_it_did(installation, row, platform):
    found = result_of(installation, row, platform, model_store())
    known = read_known().get(row.name, {}).get(platform)
    assert differences(f"{row.name} on {platform}", known, found) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"problem": "Upper bounds are not specified"}, "Upper bounds are not specified"),
        ({"ms": (30.0, 12.6)}, "12.6 ms, it was 10.0 ms"),
        ({"tokens_per_s": (40.0, 79.9)}, "79.9 tokens/s are predicted, it was 100.0"),
        ({"mb": 81.0}, "81.0 MB, it had 40.0 MB"),
    ],
)
def test_a_refusal_a_slower_and_a_larger_binary_are_found(change, words):
    known = Result(cpu_s=4, mb=40.0, parts=1, ms=(20.0, 10.0), tokens_per_s=(50.0, 100.0))
    assert differences("row", known, known) == []
    (difference,) = differences("row", known, msgspec.structs.replace(known, **change))
    assert words in difference


def test_the_page_shows_the_committed_results():
    known = read_known()
    assert [*known] == [row.name for row in ROWS], (
        f"{KNOWN.name} must have each row; run python -m tests.wine.npu_compiler"
    )
    assert table(known) in PAGE.read_text()


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
