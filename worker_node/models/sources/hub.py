"""Repositories of a model hub, through huggingface_hub: what they hold, and their files, each verified.

The endpoint is huggingface_hub's (`HF_ENDPOINT`), the token as well (`HF_TOKEN`, or `hf auth login`).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from worker_node.core.errors import DownloadFailed, HashMismatch
from worker_node.models.download import file_sha256
from worker_node.models.progress import Progress
from worker_node.models.sources.hub_errors import explain
from worker_node.models.sources.listing import Listing, RemoteFile
from worker_node.models.sources.reference import HubReference


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
        raise explain(error, reference) from error
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
            _download(reference.repo, listing.revision, file, path, progress)
        except Exception as error:
            raise explain(error, reference, file.path) from error
    found = file_sha256(path)
    declared, actual = (file.sha256, found) if file.sha256 else (file.git_sha1, _git_blob_sha1(path))
    if declared != actual:
        path.unlink()
        raise HashMismatch(
            f"{file.path} of {reference} has hash {actual}, the hub declares {declared}: it was damaged or changed on "
            "the way, and is removed; pull again"
        )
    return found


def _download(repo: str, revision: str, file: RemoteFile, path: Path, progress: Progress) -> None:
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
