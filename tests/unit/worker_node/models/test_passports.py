"""Passports: whose signature counts, what they hold for, and what they forbid."""

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.passports import passport_for
from worker_node.core.errors import ConfigurationError
from worker_node.models.passports import Identity, Passport, PassportStore, now, standing
from worker_node.serving.build import refusal

SCHEMA = Path(__file__).parents[4] / "docs" / "passport.schema.json"
HERE = Identity("m", "0" * 64, "NPU", "4000", "1.2", "c", "2026.4", "1" * 64, False)


def passport(**more):
    identity = {name: more.pop(name) for name in Identity.__dataclass_fields__ if name in more}
    return passport_for(replace(HERE, **identity), **{"made": now(), **more})


@pytest.fixture
def store(tmp_path):
    return PassportStore(tmp_path / "own")


def standing_in(store, identity):
    return standing(store.of(identity.model, identity.device), identity)


def test_the_published_schema_is_that_of_the_code():
    assert json.loads(SCHEMA.read_text()) == Passport.model_json_schema()


def test_a_file_that_was_put_there_by_hand_counts_no_more_than_an_imported_one(store, tmp_path):
    signed = store.sign_and_store(passport())
    assert standing_in(store, HERE).state == "certified"
    other = PassportStore(tmp_path / "other")
    other.directory.mkdir()
    (other.directory / signed.file_name).write_bytes(signed.model_dump_json().encode())
    assert other.list() == []
    assert standing_in(other, HERE).state == "not certified"


@pytest.mark.parametrize("changed", [{"verdict": "failed"}, {"emulated": True}, {"driver": "9"}, {"checks": []}])
def test_a_passport_that_was_changed_is_refused(store, changed):
    signed = store.sign_and_store(passport())
    tampered = signed.model_copy(update=changed).model_dump_json().encode()
    with pytest.raises(ConfigurationError, match="changed after it was signed"):
        store.add(tampered)
    with pytest.raises(ConfigurationError, match="not signed"):
        store.add(passport().model_dump_json().encode())


def test_a_private_key_that_cannot_be_used_is_replaced_by_a_new_one(store):
    signed = store.sign_and_store(passport())
    (store.directory / "private.key").write_text("damaged")
    with pytest.raises(ConfigurationError, match="npu-node passports rotate makes another"):
        store.private_key()
    store.rotate()
    assert store.sign_and_store(passport(model="n")) in store.list()
    assert signed in store.list()


def test_a_key_is_not_replaced_where_the_list_of_keys_cannot_be_kept(store):
    signed = store.sign_and_store(passport())
    (store.directory / "public.keys").unlink()
    (store.directory / "public.keys").mkdir()
    before = (store.directory / "private.key").read_bytes()
    with pytest.raises(ConfigurationError, match=r"public\.keys cannot be read"):
        store.rotate()
    assert (store.directory / "private.key").read_bytes() == before
    assert signed not in store.list()


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("driver", "1.3", "the driver changed"),
        ("openvino", "2027", "the OpenVINO version changed"),
        ("model_hash", "2" * 64, "the model changed"),
        ("settings_hash", "2" * 64, "the settings changed"),
    ],
)
def test_it_expires_when_what_it_is_bound_to_changes(store, field, value, named):
    store.sign_and_store(passport(verdict="failed"))
    assert refusal(standing_in(store, HERE), required=False) is not None
    found = standing_in(store, replace(HERE, **{field: value}))
    assert found.state == "expired"
    assert named in found.reason
    assert refusal(found, required=False) is None, "a failure that has expired excludes nothing"
    assert "it is expired" in refusal(found, required=True)


def test_what_is_required_and_what_an_emulated_npu_proves(store):
    assert "not certified" in refusal(standing_in(store, HERE), required=True)
    store.sign_and_store(passport(verdict="incomplete"))
    assert standing_in(store, HERE).state == "not certified", "some checks certify nothing"
    store.sign_and_store(passport(emulated=True, architecture="emulated"))
    assert standing_in(store, HERE).state == "not certified", "nothing of an emulated NPU says anything of a real one"
    emulated = replace(HERE, architecture="emulated", emulated=True)
    assert standing_in(store, emulated).state == "certified"
    assert refusal(standing_in(store, emulated), required=False) is None
    assert "emulated" in refusal(standing_in(store, emulated), required=True)
    store.sign_and_store(passport(verdict="limited", limits={"max_prompt_tokens": 480}))
    found = standing_in(store, HERE)
    assert (found.state, found.passport.limits.max_prompt_tokens) == ("limited", 480)
    assert refusal(found, required=True) is None


def test_the_newest_result_counts_whatever_its_file_is_called(store):
    older = store.sign_and_store(passport(made="2026-11-01T10:00:00+00:00"))
    (store.directory / "0-copy.json").write_text(older.model_dump_json())
    store.sign_and_store(passport(made="2026-11-02T11:00:00+02:00", verdict="failed"))
    assert standing_in(store, HERE).state == "failed"
    with pytest.raises(ConfigurationError, match="must be newer than the one that is kept, of 2026-11-02T11"):
        store.add(older.model_dump_json().encode())


@pytest.mark.linux
def test_what_root_certified_counts_for_a_service(store):
    signed = store.sign_and_store(passport())
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in store.directory.iterdir()}
    assert modes == {signed.file_name: 0o644, "public.keys": 0o644, "private.key": 0o600}
    # The service may not read the private key, and needs only the public one.
    (store.directory / "private.key").unlink()
    assert store.list() == [signed]


def test_a_file_that_cannot_be_read_hides_no_other(store, caplog):
    signed = store.sign_and_store(passport())
    (store.directory / "directory.json").mkdir()
    assert store.list() == [signed]
    assert "directory.json does not count: it cannot be read" in caplog.text


FAILED = {"name": "load", "status": "failed", "detail": "", "facts": [], "values": {}}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"checks": [FAILED]}, "one of them failed"),
        ({"verdict": "limited"}, "limits must have max_prompt_tokens"),
        ({"rates": {"tokens_per_s": 0.0001}}, "rates.tokens_per_s"),
        ({"made": "2026-11-01T10:00:00"}, "made must be a time with its offset"),
    ],
)
def test_a_signed_passport_that_contradicts_itself_is_refused(wrong, said):
    content = json.loads(passport().model_dump_json()) | wrong
    with pytest.raises(ConfigurationError, match=said):
        Passport.read(json.dumps(content).encode())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b" " * 1_000_001,
        passport().model_dump_json().replace('"format":1', '"format":2').encode(),
        passport().model_dump_json().replace("12.5", "1e999").encode(),
        passport().model_dump_json().replace('"made":"2', '"made":"x').encode(),
        passport().model_dump_json()[:-1].encode() + b',"more":1}',
    ],
)
def test_what_is_no_passport_is_refused_by_name(store, content):
    with pytest.raises(ConfigurationError, match="passport"):
        store.add(content)


@pytest.mark.parametrize("model", ["../../etc/x", "a/b", "ö"])
def test_a_name_leaves_the_directory_never(store, model):
    store.sign_and_store(passport(model=model))
    assert {path.parent for path in store.directory.iterdir()} == {store.directory}
    assert len(store.list()) == 1
