"""Has a model in the hub's cache: downloads missing files, or uses the cached ones where the hub can't be asked."""

from __future__ import annotations

import glob
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from runner_svc.hub.cache import (
    hub_cache_folder,
    is_offline,
    missing_file,
    repository_folder,
    snapshot_files,
    snapshot_folder,
)
from runner_svc.hub.complaints import hub_address, is_unreachable, one_line, refusal, storage_problem, why_unreachable
from runner_svc.hub.gguf_files import choose_gguf
from runner_svc.hub.names import HubError, HubName
from runner_svc.hub.needed_files import CONFIG, description_files, gguf_files, holds_gguf, weight_files
from runner_svc.interface.progress import Progress

_LOOK_S = 0.25
"""Seconds between looks at how much is there."""
_ANSWER_S = 10.0
"""Seconds that the hub has for its list of files."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the repository."""

    size: int
    """Bytes."""
    blob: str
    """Name of its bytes in the cache."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What the hub has of a revision."""

    commit: str
    files: dict[str, RemoteFile]


def hub_model(name: HubName, progress: Progress, check: Callable[[Path], None]) -> Path:
    """Returns the folder of a model in safetensors, or the first .gguf file of one in GGUF, downloaded if needed.

    `check` is called with the folder before weights are downloaded, once what describes the model is there; what it
    raises is passed on. Raises HubError.
    """
    cache = hub_cache_folder()
    if is_offline():
        return _cached(name, cache, None)
    try:
        listing = _listing(name)
    except Exception as error:  # of any type: the HTTP library's are not this library's
        if (why := refusal(name, error)) is not None:
            return _cached_after_refusal(name, cache, why)
        if not is_unreachable(error):
            raise HubError(f"{name.repo} can't be downloaded: {one_line(error)}.") from error
        return _cached(name, cache, error)
    files = listing.files
    download = _Download(name, cache, listing, progress)
    if gguf := gguf_files(files, name):
        return download.fetch(gguf) / gguf[0]
    described = description_files(files)
    if CONFIG not in described:
        raise HubError(f"{name.repo} has neither {CONFIG} nor a .gguf file: give a repository of a text model.")
    folder = download.fetch(described, "the configuration and tokenizer of ")
    check(folder)
    return download.fetch([*described, *weight_files(files, folder, name.repo)])


def _listing(name: HubName) -> Listing:
    """Asks the hub for the repository's files."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise HubError(f"Downloads need huggingface_hub (pip install 'roster-serve[runner]'): {error}") from error

    info = HfApi(endpoint=hub_address()).model_info(
        name.repo, revision=name.revision, files_metadata=True, timeout=_ANSWER_S
    )
    files = {
        file.rfilename: RemoteFile(file.size or 0, file.lfs.sha256 if file.lfs else file.blob_id or "")
        for file in info.siblings or ()
    }
    return Listing(info.sha or "", files)


class _Download:
    """Downloads of one snapshot."""

    def __init__(self, name: HubName, cache: Path, listing: Listing, progress: Progress) -> None:
        self._name, self._cache, self._progress = name, cache, progress
        self._commit, self._files = listing.commit, listing.files
        self._repository = repository_folder(cache, name.repo)

    def fetch(self, paths: Iterable[str], of: str = "") -> Path:
        """Returns the snapshot's folder once the files are in it; files of the cache are not downloaded again.

        `of`: what they are, before the model's name.
        """
        wanted = list(paths)
        cached = snapshot_folder(self._repository, self._name.revision)
        if cached is not None and cached.name == self._commit and all((cached / path).is_file() for path in wanted):
            return cached  # also where nothing can be written
        missing = self._missing(wanted)
        self._check_room(missing)
        outcome: list[Path | Exception] = []

        def run() -> None:
            try:
                outcome.append(self._snapshot(wanted))
            except Exception as error:
                outcome.append(error)

        # In a thread, which a signal's SystemExit in this one leaves behind.
        thread = threading.Thread(target=run, name="download", daemon=True)
        thread.start()
        what = f"downloading {of}{self._name} ({_size(sum(self._files[path].size for path in missing))})"
        self._watch(thread, missing, what)
        if isinstance(outcome[0], Exception):
            raise HubError(self._failure(outcome[0])) from outcome[0]
        if missing:
            self._progress(what, 1.0)
        return outcome[0]

    def _snapshot(self, paths: list[str]) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()  # they would be drawn over this one's
        patterns = [glob.escape(path) for path in paths]
        return Path(
            snapshot_download(
                self._name.repo,
                revision=self._name.revision,
                cache_dir=self._cache,
                allow_patterns=patterns,
                endpoint=hub_address(),
            )
        )

    def _watch(self, thread: threading.Thread, missing: list[str], what: str) -> None:
        """Reports progress until the thread ends."""
        total = sum(self._files[path].size for path in missing)
        present = sum(map(self._num_present, missing))
        if missing:
            self._progress(what, present / max(1, total))
        while thread.is_alive():
            thread.join(_LOOK_S)
            if missing:
                present = max(present, sum(map(self._num_present, missing)))
                self._progress(what, min(present / max(1, total), 0.999))

    def _missing(self, paths: list[str]) -> list[str]:
        return [path for path in paths if not (self._repository / "blobs" / self._files[path].blob).is_file()]

    def _num_present(self, path: str) -> int:
        """Bytes of a file that are on the disk."""
        remote = self._files[path]
        if not remote.blob:
            return 0
        sizes = [_bytes(blob) for blob in (self._repository / "blobs").glob(f"{glob.escape(remote.blob)}*")]
        return min(max(sizes, default=0), remote.size)

    def _check_room(self, missing: list[str]) -> None:
        needed = sum(self._files[path].size - self._num_present(path) for path in missing)
        folder = self._cache
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise HubError(
                f"{self._name} needs {_size(needed)}, but the disk of {self._cache} has {_size(free)} left: make room, "
                "or set HF_HUB_CACHE to a folder on another disk."
            )

    def _failure(self, error: Exception) -> str:
        if (why := storage_problem(error, self._cache) or refusal(self._name, error)) is not None:
            return why
        if is_unreachable(error):
            why = why_unreachable(error)
            return f"The download of {self._name} was interrupted, because {why}: run it again, and it goes on there."
        return f"{self._name} can't be downloaded: {one_line(error)}; run it again, and it goes on there."


def _cached_after_refusal(name: HubName, cache: Path, why: str) -> Path:
    """Returns the cached model, if it is whole, although the hub refuses it now."""
    try:
        found = _cached(name, cache, None)
    except HubError:
        raise HubError(why) from None
    log.warning("the hub refuses this model: the cached one is used", model=str(name), reason=why)
    return found


def _cached(name: HubName, cache: Path, error: Exception | None) -> Path:
    """Returns the cached model without asking the hub. `error`: why not; None when it must not be asked."""
    why = why_unreachable(error)
    todo = "unset it" if error is None else "try again with a network"
    folder = snapshot_folder(repository_folder(cache, name.repo), name.revision)
    if folder is None:
        raise HubError(
            f"{name} is neither a folder nor in the hub's cache, {cache}, and {why}: {todo}, set HF_HUB_CACHE to a "
            "cache that has it, or give the folder of a copy."
        )
    if (missing := missing_file(folder, name.file)) is not None:
        raise HubError(f"{name} is only partly in the hub's cache ({missing} is missing), and {why}: {todo}.")
    if error is not None:
        log.warning("the hub is not asked for a newer revision: the cached one is used", model=str(name), reason=why)
    files = snapshot_files(folder)
    if name.file is not None or holds_gguf(files):
        return folder / choose_gguf(files, name.file, name.repo)[0]
    return folder


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # renamed meanwhile
        return 0


def _size(num_bytes: int) -> str:
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"
