"""Model files from a model hub, through huggingface_hub, each verified against what the hub declares for it."""

from __future__ import annotations

import fnmatch
import hashlib
from pathlib import Path
from typing import Any

from worker_node.errors import DownloadFailed, HashMismatch
from worker_node.models.catalog import HubSource
from worker_node.models.download import file_sha256
from worker_node.models.progress import Progress


def fetch_repository(source: HubSource, into: Path, progress: Progress) -> dict[str, str]:
    """Download the wanted files of a repository to `into`; returns the sha256 found, by file name.

    The revision is resolved to a commit first, so that all files are of one version. Large files are verified
    against the sha256 that the hub declares (LFS), small ones against their git object hash.
    Raises DownloadFailed when huggingface_hub is not installed, the hub cannot be reached or lacks the
    repository, HashMismatch when a file is not the one that was declared.
    """
    hub = _huggingface_hub()
    progress.stage(f"asking the hub for {source.repo}")
    try:
        info = hub.HfApi().model_info(source.repo, revision=source.revision, files_metadata=True)
    except Exception as error:
        raise _failed(source, error) from error
    wanted = [file for file in info.siblings or () if _is_wanted(file.rfilename, source)]
    if not wanted:
        raise DownloadFailed(f"{source} holds none of the files {', '.join(source.files)}")
    return {file.rfilename: _fetch(hub, source, info.sha, file, into, progress) for file in wanted}


def _huggingface_hub() -> Any:
    try:
        import huggingface_hub  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise DownloadFailed("models of a hub need huggingface_hub: pip install 'npu-node[hub]'") from error
    return huggingface_hub


def _is_wanted(path: str, source: HubSource) -> bool:
    # A pattern without a directory means files of the top directory only.
    return any(path.count("/") == glob.count("/") and fnmatch.fnmatchcase(path, glob) for glob in source.files)


def _fetch(hub: Any, source: HubSource, commit: str, file: Any, into: Path, progress: Progress) -> str:
    progress.stage(f"downloading {file.rfilename}", file.size)
    try:
        hub.hf_hub_download(
            source.repo, file.rfilename, revision=commit, local_dir=into, tqdm_class=_listening(progress)
        )
    except Exception as error:
        raise _failed(source, error) from error
    path = into / file.rfilename
    found = file_sha256(path)
    if file.lfs is not None:
        declared, actual = file.lfs.sha256, found
    else:
        declared, actual = file.blob_id, _git_blob_sha1(path)
    if declared != actual:
        raise HashMismatch(f"{file.rfilename} of {source} has hash {actual}, the hub declares {declared}; not used")
    return found


def _git_blob_sha1(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _listening(progress: Progress) -> type[Any]:
    from tqdm.std import tqdm  # noqa: PLC0415 (comes with huggingface_hub)

    class Listening(tqdm):  # type: ignore[misc]  # tqdm has no types
        """Hands tqdm's count on instead of drawing a bar of its own."""

        def display(self, *_args: Any, **_kwargs: Any) -> None:
            progress.update(int(self.n))

    return Listening


def _failed(source: HubSource, error: Exception) -> DownloadFailed:
    reason = " ".join(str(error).split())[:400]
    return DownloadFailed(
        f"could not download {source}: {type(error).__name__}: {reason} "
        "(check the network, and HF_TOKEN where the repository asks for one)"
    )
