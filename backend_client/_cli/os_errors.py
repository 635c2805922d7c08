"""What an error of the operating system means to whoever typed the command, in one sentence."""

from __future__ import annotations

import errno

_REMEDIES = {
    errno.ENOSPC: "free some space, or write to a larger disk",
    errno.EDQUOT: "free some space, or write to a larger disk",
    errno.EROFS: "choose a directory that can be written",
    errno.EACCES: "choose a file or directory that this user may use",
    errno.EPERM: "choose a file or directory that this user may use",
    errno.EMFILE: "raise the limit of open files: ulimit -n 4096",
    errno.ENETUNREACH: "check the network and the node's address",
    errno.EADDRINUSE: "choose another --port",
}


def sentence(error: OSError) -> str:
    """What happened, where, and what to do about it."""
    where = f"{error.filename}: " if error.filename else ""
    reason = (error.strerror or str(error) or type(error).__name__).lower()
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{where}{reason}" + (f"; {remedy}" if remedy else "")
