"""Reading the columns of many files neither mixes them up nor holds up the end of an interrupted process."""

import subprocess
import sys
import threading

import pytest

from backend_client.lifetime import map_in_daemon_threads


def test_results_come_in_the_order_of_the_items_and_from_several_threads_at_once():
    together = threading.Barrier(3)

    def double(item):
        together.wait(30)
        return 2 * item

    assert map_in_daemon_threads(double, range(6), 3, "test") == [0, 2, 4, 6, 8, 10]
    assert map_in_daemon_threads(double, [], 3, "test") == []


def test_the_first_error_in_the_order_of_the_items_is_raised():
    def fail(item):
        raise OSError(f"item {item}")

    with pytest.raises(OSError, match="item 0"):
        map_in_daemon_threads(fail, range(5), 2, "test")


INTERRUPTED = """
import threading
from backend_client.lifetime import map_in_daemon_threads
begun = threading.Event()
def read(item):
    begun.set()
    threading.Event().wait()
threading.Thread(target=map_in_daemon_threads, args=(read, [1, 2], 1, "files"), daemon=True).start()
begun.wait()
"""


def test_a_process_ends_while_files_are_being_read():
    assert subprocess.run([sys.executable, "-c", INTERRUPTED], timeout=60, check=False).returncode == 0
