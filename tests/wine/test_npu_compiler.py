"""Everything that a node sends to an NPU compiles for each generation, no slower and no larger than it did."""

import pytest

from tests.wine.npu_compiler import ROWS, SMALL, compile_row, differences, read_known
from tests.wine.windows import windows

CASES = [
    *((row, [name for name in row.platforms if name in SMALL]) for row in ROWS if row.small),
    *(pytest.param(row, row.platforms, marks=pytest.mark.long) for row in ROWS if not row.small),
    *(pytest.param(row, ("5020",), marks=pytest.mark.long) for row in ROWS if row.small),
]


@pytest.fixture(scope="session")
def installation():
    return windows()


@pytest.mark.timeout(4000)
@pytest.mark.parametrize(("row", "platforms"), CASES, ids=lambda value: getattr(value, "name", ""))
def test_what_a_node_sends_compiles_as_well_as_it_did(installation, row, platforms):
    found = compile_row(installation, row, platforms)
    known = read_known().get(row.name, {})
    worse = {name: differences(row.name, known.get(name), result) for name, result in found.items()}
    assert not any(worse.values()), worse
