"""Whatever happens to the process that converts, the parent has a clear error and a store as it was."""

import os
import signal

import psutil
import pytest

from tests.support.published import install
from worker_node.core.errors import ConversionFailed
from worker_node.models.progress import Progress
from worker_node.models.store import ModelStore

pytestmark = pytest.mark.slow
CONVERSION = ["worker_node.models", "convert"]


class Crash(Progress):
    """Ends the converting process when it builds the encoder."""

    def stage(self, name, total=None):
        if name == "building the encoder":
            for child in psutil.Process().children():
                if child.cmdline()[-2:] == CONVERSION:
                    os.kill(child.pid, signal.SIGSEGV)


@pytest.mark.linux
def test_a_crash_is_told_by_its_signal(store_root, make_bert):
    with pytest.raises(ConversionFailed, match="SIGSEGV"):
        install(ModelStore(), make_bert()[0], "x", Crash())
    assert {path.name for path in store_root.iterdir()} == {".locks"}


def test_an_interruption_ends_the_process_and_leaves_nothing(store_root, make_bert):
    class Interrupt(Progress):
        def stage(self, name, total=None):
            if name == "building the encoder":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install(ModelStore(), make_bert()[0], "x", Interrupt())
    assert not [c for c in psutil.Process().children() if c.cmdline()[-2:] == CONVERSION]
    assert {path.name for path in store_root.iterdir()} == {".locks"}
