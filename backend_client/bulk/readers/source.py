"""An input file as bytes, which keeps apart a store that fails from content that is damaged."""

from __future__ import annotations

import io
from typing import Any

from backend_client.bulk.inputs import InputFile, changed
from backend_client.bulk.optional import file_system


class InputChanged(OSError):
    """The file is no longer the one that the job was planned from."""


class InputSource(io.RawIOBase):
    """A file opened for reading. `failure` is the error of the store, where it was that which ended a reader.

    Decoders report a read that failed and bytes that make no sense alike; only the second is the file's own fault.
    """

    def __init__(self, file: Any, size: int) -> None:
        self._file = file
        self._size = size
        self.failure: OSError | None = None

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer. Raises OSError."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes. Raises OSError."""
        try:
            data: bytes = self._file.read(size)
        except OSError as error:
            self.failure = error
            raise
        except Exception as error:
            # fsspec's backends have exceptions of their own for what happens on the network.
            self.failure = OSError(f"{type(error).__name__}: {error}")
            raise self.failure from error
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move. Raises OSError."""
        place: int = self._file.seek(offset, whence)
        return place

    def tell(self) -> int:
        """The place in the file."""
        place: int = self._file.tell()
        return place

    def size(self) -> int:
        """Bytes in all."""
        return self._size

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._file.close()
        super().close()


def check_unchanged(file: InputFile) -> None:
    """Raise InputChanged unless the file is the planned one; OSError when the store fails."""
    try:
        same = not changed(file)
    except FileNotFoundError:
        same = False
    if not same:
        raise InputChanged(f"{file.url} has changed since the job began: restore it, or begin another job")


def opened(file: InputFile) -> InputSource:
    """The file, checked to be the planned one. Raises InputChanged, OSError."""
    check_unchanged(file)
    system, path = file_system(file.url)
    return InputSource(system.open(path, "rb"), file.size)
