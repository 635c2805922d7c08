"""`npu-node passports`: what is kept, compared, carried to another node, and signed by a new key."""

import json

import pytest

from tests.support.passports import check, passport_for
from worker_node.cli.main import main
from worker_node.models.passports import Identity, PassportStore

HERE = Identity("m", "0" * 64, "NPU", "4000", "1.2", "c", "2026.4", "1" * 64, False)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("NPU_NODE_PASSPORTS", str(tmp_path / "own"))
    return PassportStore(tmp_path / "own")


@pytest.fixture
def passports(capsys):
    def run(*words, status=0):
        assert main(["passports", *map(str, words)]) == status
        return capsys.readouterr().out

    return run


def write(path, passport):
    path.write_text(passport.model_dump_json())
    return path


def test_what_one_node_exports_another_imports_if_it_trusts_the_key(store, passports, tmp_path, monkeypatch, capsys):
    signed = store.sign_and_store(passport_for(HERE))
    exported = passports("export", "m.NPU")
    assert json.loads(exported) == json.loads(passports("show", "m.NPU"))
    file = tmp_path / "m.passport.json"
    file.write_text(exported)
    monkeypatch.setenv("NPU_NODE_PASSPORTS", str(tmp_path / "other"))
    assert main(["passports", "import", str(file)]) == 1
    assert "nor in trusted_keys" in capsys.readouterr().err
    monkeypatch.setenv("NPU_NODE_TRUSTED_KEYS", json.dumps([signed.signature.key]))
    assert passports("import", file) == "kept: m.NPU.json\n"
    assert passports("list").splitlines()[1].startswith("m.NPU ")


def test_a_difference_of_two_passports_is_named(store, passports, tmp_path):
    checks = [check("load", "passed"), check("canary", "passed"), check("endurance", "skipped")]
    store.sign_and_store(passport_for(HERE, checks=checks, made="2026-09-01T10:00:00+00:00"))
    later = [check("load", "passed") | {"detail": "4 s"}, check("canary", "failed") | {"detail": "wrong"}]
    other = passport_for(HERE, checks=later, driver="1.3", verdict="failed", made="2026-10-01T10:00:00+00:00")
    file = write(tmp_path / "other.json", other)
    assert passports("diff", "m.NPU", file, status=1).splitlines() == [
        "driver: 1.2 | 1.3",
        "verdict: certified | failed",
        "canary: passed  | failed wrong",
        "endurance: skipped  | not made",
    ]


def test_passports_of_equal_results_do_not_differ(store, passports, tmp_path):
    store.sign_and_store(passport_for(HERE))
    file = write(tmp_path / "later.json", passport_for(HERE, made="2026-10-01T10:00:00+00:00"))
    assert passports("diff", "m.NPU", file) == ""


def test_a_new_key_signs_from_now_on_and_what_the_old_one_signed_is_still_listed(store, passports):
    old = store.sign_and_store(passport_for(HERE)).signature.key
    new = passports("rotate").strip()
    assert new != old
    assert passports("keys").split() == sorted([old, new])
    assert passports("list").splitlines()[1].startswith("m.NPU ")
    assert store.sign_and_store(passport_for(HERE)).signature.key == new


def test_a_name_that_is_not_kept_is_refused(store, passports, capsys):
    assert main(["passports", "show", "n.NPU"]) == 1
    assert "there is no passport n.NPU; npu-node passports list shows their names" in capsys.readouterr().err
