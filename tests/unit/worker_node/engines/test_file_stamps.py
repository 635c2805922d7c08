"""Whether the files of a model are still those that its engine was made for."""

import os

from worker_node.engines.supervisor import file_stamps


def test_only_a_change_of_content_changes_the_stamps(tmp_path):
    weights = tmp_path / "openvino_model.bin"
    weights.write_bytes(b"weights")
    before = file_stamps(str(tmp_path))
    (tmp_path / "backup").mkdir()
    os.link(weights, tmp_path / "backup" / "openvino_model.bin")
    weights.chmod(0o600)
    assert file_stamps(str(tmp_path)) == before
    (tmp_path / "new").write_bytes(b"WEIGHTS")
    os.utime(tmp_path / "new", ns=(weights.stat().st_atime_ns, weights.stat().st_mtime_ns))
    (tmp_path / "new").replace(weights)
    assert file_stamps(str(tmp_path)) != before
