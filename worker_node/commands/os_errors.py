"""What an error of the operating system means to whoever typed the command, in one sentence."""

from __future__ import annotations

import errno

from worker_node.models.sources.disk import storage_problem

_NETWORK = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ECONNREFUSED, errno.ECONNRESET})


def sentence(error: OSError) -> str:
    """What happened, where, and what to do about it."""
    if (problem := storage_problem(error)) is not None:
        return problem
    where = f"{error.filename}: " if error.filename else ""
    reason = (error.strerror or str(error) or type(error).__name__).lower()
    if error.errno in _NETWORK or isinstance(error, ConnectionError):
        return f"{where}{reason}; check the network, the address and the proxy settings (HTTPS_PROXY, NO_PROXY)"
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return f"{where}{reason}; raise the limit of open files: ulimit -n 4096"
    if error.errno in {errno.ENOMEM, errno.EAGAIN}:
        return f"{where}{reason}; stop other programs, or raise the limits of memory and processes (ulimit -a)"
    return f"{where}{reason}"
