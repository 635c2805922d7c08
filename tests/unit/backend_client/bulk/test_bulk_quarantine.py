"""What the output keeps of fragments that a run gave up."""

from backend_client.bulk.inputs import Fragment, InputFile
from backend_client.bulk.output import QUARANTINE_FOLDER, read_quarantined, record_quarantined
from backend_client.bulk.stores import open_store

FRAGMENT = Fragment(InputFile("file:///in.parquet", 1, "v", "parquet"), 0, 10, 10)


def test_why_a_fragment_was_given_up_is_kept_also_where_the_machine_lost_its_power(tmp_path):
    store = open_store(str(tmp_path))
    record_quarantined(store, {FRAGMENT.id: "its process died"})
    assert read_quarantined(store, [FRAGMENT]) == {FRAGMENT.id: "its process died"}
    assert read_quarantined(store, []) == {}
    store.put(f"{QUARANTINE_FOLDER}/{FRAGMENT.id}.json", b"")
    assert "lost" in read_quarantined(store, [FRAGMENT])[FRAGMENT.id]
