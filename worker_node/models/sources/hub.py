"""Says in plain words what a hub refused, and what the user can do about it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from worker_node.core.errors import DownloadFailed, HashMismatch, ModelError
from worker_node.models.progress import Progress
from worker_node.models.sources.disk import disk_full
from worker_node.models.sources.packages import file_sha256
from worker_node.models.sources.reference import HubReference
from worker_node.models.sources.selection import Listing, RemoteFile

_MAX_REASON = 300


def explain(error: Exception, reference: HubReference, file: str | None = None) -> ModelError:
    """The error to raise for one of huggingface_hub's or its HTTP client's."""
    if (full := disk_full(error)) is not None:
        return full
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = _refusal(error, reference, file, status) or _status_reason(error, status) or _lost(error, file)
    return DownloadFailed(f"{reference}: {reason or f'{type(error).__name__}: {_text(error)}'}")


def _refusal(error: Exception, reference: HubReference, file: str | None, status: int | None) -> str | None:
    """What the hub says that it has not, or does not give."""
    from huggingface_hub import errors, get_token  # noqa: PLC0415 (an extra)

    page = f"{_hub_errors_endpoint()}/{reference.repo}"
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
    return f"no connection to {_hub_errors_endpoint()} {remedy} ({type(error).__name__}: {_text(error)})"


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


def _hub_errors_endpoint() -> str:
    from huggingface_hub import constants  # noqa: PLC0415 (an extra)

    # huggingface_hub reads the variable only once, when it is imported.
    return os.environ.get("HF_ENDPOINT") or str(constants.ENDPOINT)


def _text(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MAX_REASON]


# Repositories of a model hub, through huggingface_hub: what they hold, and their files, each verified.
#
# The endpoint is huggingface_hub's (`HF_ENDPOINT`), the token as well (`HF_TOKEN`, or `hf auth login`).


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
