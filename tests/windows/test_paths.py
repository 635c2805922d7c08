"""Names of models that requests choose."""

from pathlib import Path

import pytest

from worker_node.models.sources import alias_of, is_below


@pytest.mark.parametrize("name", [r"\\other\share\model", "//other/share/model", r"\\?\UNC\other\share\model"])
def test_no_share_of_another_machine_is_looked_at(monkeypatch, tmp_path, name):
    for look in ("stat", "resolve"):
        monkeypatch.setattr(Path, look, lambda path, **_: pytest.fail(f"it looked at {path}"))
    assert alias_of(name) == str(Path(name)).lower()
    assert not is_below(name, [tmp_path])
