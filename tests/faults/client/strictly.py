"""Programs in interpreters that complain about whatever is left open."""

import subprocess
import sys

# In its development mode asyncio also tells what took over 100 ms, which on a busy machine anything does.
PATIENT = """
import logging
logging.getLogger("asyncio").addFilter(lambda record: not str(record.msg).startswith("Executing %s took"))
"""


def run_strictly(program, *arguments):
    """What a Python program prints that writes nothing to stderr and ends well."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", PATIENT + program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout
