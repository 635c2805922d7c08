"""One file by its URL: continued after a broken connection, verified against the hash that the user gave."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from worker_node.core.errors import BadRequest, DownloadFailed, HashMismatch, ModelError
from worker_node.models.progress import Progress
from worker_node.models.sources.disk import disk_full, in_gigabytes, require_space
from worker_node.models.sources.packages import file_sha256
from worker_node.models.sources.reference import UrlReference

if TYPE_CHECKING:
    import httpx2


_RETRIES = 5
_RETRY_S = 1.0
# A server that sends nothing for so long is as good as gone.
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
            before = _size(part)
            try:
                if _receive(client, reference, part, progress):
                    return
                reason = "the server ended the answer early"
            except httpx2.InvalidURL as error:
                raise BadRequest(f"{reference.url}: {error}", param="model") from error
            except httpx2.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
            left = _RETRIES if _size(part) > before else left - 1
            if left <= 0:
                raise DownloadFailed(
                    f"{reference.url}: {reason}; {in_gigabytes(_size(part))} arrived and are kept: pull again to "
                    "continue"
                )
            sleep(_RETRY_S)


def _receive(client: httpx2.Client, reference: UrlReference, part: Path, progress: Progress) -> bool:
    """One request; whether the file is whole now."""
    have = _size(part)
    headers = _continuation(reference, part, have)
    have = have if headers else 0
    with client.stream("GET", reference.url, headers=headers) as response:
        if response.status_code == 416 and have:
            part.unlink()  # shorter than what is here: another file
            return False
        if response.status_code in _AGAIN:
            response.raise_for_status()
        if response.status_code not in {200, 206}:
            raise _refused(reference, response.status_code)
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
    """The headers that ask for the rest; empty where a rest cannot be told from one of another version."""
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


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _refused(reference: UrlReference, status: int) -> ModelError:
    reasons = {
        401: "it needs a login, which a URL cannot carry: download the file yourself and pull the local file",
        403: "access is forbidden: a licence may have to be accepted, or the link has expired",
        404: "there is no such file",
        410: "the file is gone",
    }
    return DownloadFailed(f"{reference.url}: {reasons.get(status, 'the server refused the request')} ({status})")
