"""Says in plain words what a hub refused, and what the user can do about it."""

from __future__ import annotations

import os

from worker_node.core.errors import DownloadFailed, ModelError
from worker_node.models.sources.disk import disk_full
from worker_node.models.sources.reference import HubReference

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

    page = f"{_endpoint()}/{reference.repo}"
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
    return f"no connection to {_endpoint()} {remedy} ({type(error).__name__}: {_text(error)})"


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


def _endpoint() -> str:
    from huggingface_hub import constants  # noqa: PLC0415 (an extra)

    # huggingface_hub reads the variable only once, when it is imported.
    return os.environ.get("HF_ENDPOINT") or str(constants.ENDPOINT)


def _text(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MAX_REASON]
