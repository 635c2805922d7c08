"""Ends a command: errors as one sentence on standard error, and an exit status."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from backend_client._cli.os_errors import sentence
from backend_client.errors import ConfigurationError, NPUError


class WrongUsage(ConfigurationError):
    """The values of a command's flags make no sense."""


def reported(work: Callable[[], int]) -> int:
    """The status of `work`, or that of the error it raised: 1 with a message, 2 for WrongUsage, 130 interrupted."""
    try:
        return work()
    except WrongUsage as error:
        return _fail(error.message, 2)
    except NPUError as error:
        return _fail(error.message)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # As `npu-client embed | head`: the reader of our output has seen enough.
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        try:
            sys.stdout.flush()
        except OSError:  # such as a full disk: what is left of the output would be written again at exit
            _drop_output()
        return _fail(sentence(error))


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, status: int = 1) -> int:
    print(f"npu-client: {message}", file=sys.stderr)
    return status
