"""What the output keeps of fragments that a run gave up."""

from backend_client.bulk.inputs import Fragment, InputFile
from backend_client.bulk.output import QUARANTINE_FOLDER, Quarantined, forget, record, recorded
from backend_client.bulk.stores import open_store

FRAGMENT = Fragment(InputFile("file:///in.parquet", 1, "v", "parquet"), 0, 10, 10)


def test_why_a_fragment_was_given_up_is_kept_until_it_is_forgotten(tmp_path):
    store = open_store(str(tmp_path))
    record(store, Quarantined(FRAGMENT, 3, "its process died"))
    assert recorded(store, [FRAGMENT]) == {FRAGMENT.id: "file:///in.parquet 0-10: its process died"}
    assert recorded(store, []) == {}
    forget(store)
    assert recorded(store, [FRAGMENT]) == {}


def test_a_record_that_the_machine_lost_with_its_power_still_tells_of_the_fragment(tmp_path):
    store = open_store(str(tmp_path))
    store.put(f"{QUARANTINE_FOLDER}/{FRAGMENT.id}.json", b"")
    assert "lost" in recorded(store, [FRAGMENT])[FRAGMENT.id]
