"""Data sets from and to an S3-compatible server, with drivers killed and at work at once.

Runs in an environment of its own (bulk_s3.txt), which tests/integrations/test_bulk_environments.py makes.
Without arguments it is the test;
with a source, an output and a step it is a driver that is killed when it reaches that step.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import fsspec
from moto.server import ThreadedMotoServer

from backend_client.cli.main import main
from backend_client.testing import FakeFleet
from tests.faults.bulk.data_sets import assert_whole, make_input
from tests.faults.bulk.steps import observe

KILLED_AT = ["job described", "fragment begun", "temporary file complete", "rejected rows committed", "data committed"]
SOURCE = "s3://data/in"


def drive(out, step):
    def kill(name):
        if name == step:
            os.kill(os.getpid(), signal.SIGKILL)

    observe(kill)
    return main(["embed-dataset", SOURCE, out, "--rows-per-fragment", "175", "--max-rejected", "0.1"])


def driver(out, step="none"):
    return subprocess.Popen([sys.executable, __file__, out, step], env=os.environ)


def brought(system, out, folder):
    """A copy of an output on this machine, where its rows can be compared."""
    system.invalidate_cache()
    for key in system.find(out):
        path = folder / key.removeprefix(out.removeprefix("s3://") + "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(system.cat_file(key))
    return folder


def scenarios(folder):
    texts = make_input(folder / "in")
    system = fsspec.filesystem("s3")
    system.mkdir("data")
    system.put(str(folder / "in"), "data/in", recursive=True)
    for step in KILLED_AT:
        out = f"s3://data/{step.replace(' ', '-')}"
        assert driver(out, step).wait(60) == -signal.SIGKILL, step
        assert driver(out).wait(60) == 0
        assert_whole(brought(system, out, folder / step), texts)
        print(f"killed at {step}: every row once", flush=True)
    drivers = [driver("s3://data/two") for _ in range(2)]
    assert [one.wait(60) for one in drivers] == [0, 0]
    assert_whole(brought(system, "s3://data/two", folder / "two"), texts)
    print("two drivers: every row once")
    print("all as expected")


async def test():
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with FakeFleet(2) as fleet, tempfile.TemporaryDirectory() as directory:
            os.environ |= fleet.environment()
            await asyncio.to_thread(scenarios, Path(directory))
    finally:
        server.stop()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(drive(*sys.argv[1:]))
    asyncio.run(test())
