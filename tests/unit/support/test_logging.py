"""Each test begins with logging as it is after the import, whatever an earlier one set."""

import logging

import pytest


@pytest.mark.parametrize("time", [1, 2])
def test_what_a_test_sets_of_logging_is_undone_before_the_next(time, caplog):
    log = logging.getLogger("worker_node.example")
    log.warning("time %s", time)
    assert f"time {time}" in caplog.text
    logging.disable(logging.CRITICAL)
    logging.root.setLevel(logging.CRITICAL)
    logging.getLogger("worker_node").setLevel(logging.CRITICAL)
    log.propagate = False
    log.disabled = True
