"""The hub's cache on this machine, as huggingface_hub lays it out.

    models--ORGANISATION--MODEL/refs/REVISION         the commit of a branch or tag
    models--ORGANISATION--MODEL/snapshots/COMMIT/     the files, as links into blobs
    models--ORGANISATION--MODEL/blobs/                their bytes; unfinished ones end in .incomplete

It is read without that library, which takes half a second to import.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from runner_svc.hub.gguf_files import choose_gguf
from runner_svc.hub.names import HubError, HubName
from runner_svc.hub.needed_files import CONFIG, INDEX, SINGLE, holds_gguf, indexed_shards

_PREFIX = "models--"


def hub_cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder that HF_HUB_CACHE or HF_HOME name, by default ~/.cache/huggingface/hub.

    Raises HubError when there is no home folder to put it in.
    """
    try:
        if cache := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
            return Path(os.path.expandvars(cache)).expanduser()
        if home := environment.get("HF_HOME"):
            return Path(os.path.expandvars(home)).expanduser() / "hub"
        base = environment.get("XDG_CACHE_HOME")
        return (Path(base).expanduser() if base else Path.home() / ".cache") / "huggingface" / "hub"
    except RuntimeError:  # no HOME, and no passwd entry of this uid
        raise HubError(
            f"There is no folder for the hub's cache, because user {os.getuid()} has no home folder: set HF_HOME to a "
            "folder that can be written."
        ) from None


def is_offline(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbid to ask the hub."""
    values = (environment.get("HF_HUB_OFFLINE", ""), environment.get("TRANSFORMERS_OFFLINE", ""))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A snapshot of a repository."""

    repo: str
    revisions: tuple[str, ...]
    """Branches and tags that mean it; empty for a snapshot that was asked for by its commit."""
    folder: Path

    @property
    def name(self) -> str:
        """What `--model` takes for it."""
        revision = next((name for name in ("main", *self.revisions) if name in self.revisions), self.folder.name)
        return str(HubName(self.repo, revision))


def repository_folder(cache: Path, repo: str) -> Path:
    """Returns where the cache keeps a repository."""
    return cache / (_PREFIX + repo.replace("/", "--"))


def snapshot_folder(repository: Path, revision: str) -> Path | None:
    """Returns the snapshot of a branch, a tag or a commit; None when the cache has none."""
    ref = repository / "refs" / revision
    try:
        commit = _commit(ref) if ref.is_file() else revision
        folder = repository / "snapshots" / commit
        return folder if commit and folder.is_dir() else None
    except OSError:
        return None


def _commit(ref: Path) -> str:
    """Returns what a branch or tag means; of a broken file, what no snapshot is called."""
    return ref.read_bytes().decode("utf-8", "replace").replace("\0", "").strip()


def cached_models(cache: Path) -> Iterator[CachedModel]:
    """Yields all snapshots of all models, by name; none if there is no cache. Raises OSError if it is unreadable."""
    if not cache.is_dir():
        return
    for repository in sorted(cache.glob(f"{_PREFIX}*--*")):
        repo = repository.name.removeprefix(_PREFIX).replace("--", "/", 1)
        revisions: dict[str, list[str]] = {}
        for ref in sorted(path for path in repository.glob("refs/**/*") if path.is_file()):
            revisions.setdefault(_commit(ref), []).append(str(ref.relative_to(repository / "refs")))
        for snapshot in sorted(repository.glob("snapshots/*/")):
            yield CachedModel(repo, tuple(revisions.get(snapshot.name, ())), snapshot)


def snapshot_files(folder: Path) -> list[str]:
    """Returns the files of a folder that are there whole, relative to it and with slashes."""
    return sorted(
        str(PurePosixPath(path.relative_to(folder)))
        for path in folder.rglob("*")
        if path.is_file()  # not a link to a blob that is gone
    )


def missing_file(folder: Path, file: str | None = None) -> str | None:
    """Returns a file without which a snapshot can't be served, or None when it is whole.

    `file`: as in `HubName`. A GGUF model is whole if all its parts are there. Raises HubError as `choose_gguf`.
    """
    files = set(snapshot_files(folder))
    if file is not None or holds_gguf(files):
        return _missing_part(choose_gguf(files, file, str(folder)), file)
    if CONFIG not in files:
        return CONFIG
    if INDEX in files:
        return next((name for name in sorted(indexed_shards(folder) or {INDEX}) if name not in files), None)
    return None if SINGLE in files else SINGLE


def _missing_part(files: tuple[str, ...], file: str | None) -> str | None:
    if not files:
        return file
    stem, dash, count = files[0].removesuffix(".gguf").rpartition("-of-")
    if not dash or not count.isdigit():
        return None
    first = stem.rpartition("-")[0]
    parts = (f"{first}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1))
    return next((part for part in parts if part not in files), None)
