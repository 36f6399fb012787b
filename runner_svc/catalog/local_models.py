"""Lists the models on this machine by what describes them alone: no weights are read, torch is not imported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from runner_svc.catalog.gguf_header import gguf_architecture
from runner_svc.catalog.obstacles import gguf_obstacle, obstacle
from runner_svc.hub.cache import CachedModel, cached_models, missing_file, snapshot_files
from runner_svc.hub.gguf_files import gguf_models
from runner_svc.hub.names import HubError
from runner_svc.hub.needed_files import CONFIG, INDEX, SINGLE, has_tokenizer, holds_gguf
from runner_svc.hub.packaged import DEFAULT_MODEL, packaged_gguf
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.folder.json_file import read_object


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine."""

    name: str
    """What `--model` takes for it."""
    place: str
    """Where it was found: "package", "hub", "converted" or "folder"."""
    path: Path
    num_bytes: int
    architecture: str
    """As its configuration names it; "" where it names none."""
    obstacle: str | None
    """Why it can't be served, in a sentence; None when it can."""


def packaged_models() -> Iterator[LocalModel]:
    """Yields the built-in default, if its package is installed."""
    try:
        file = packaged_gguf()
    except HubError:
        return
    yield _gguf_model(DEFAULT_MODEL, "package", file, [file])


def hub_models(cache: Path) -> Iterator[LocalModel]:
    """Yields the snapshots in the hub's cache; of those in GGUF, each model."""
    for cached in cached_models(cache):
        files = snapshot_files(cached.folder)
        ggufs = gguf_models(files)
        has_weights = CONFIG in files and (INDEX in files or SINGLE in files)
        if has_weights or not ggufs:
            yield _folder_model(cached.name, "hub", cached.folder)
        for first, parts in ggufs.items():
            yield _cached_gguf(cached, first, parts)


def converted_models(cache_folder: Path) -> Iterator[LocalModel]:
    """Yields the conversions of GGUF files, which are made again if they are deleted.

    They are not to be served by their path: a runner that is given the .gguf file finds the conversion, but never one
    that an older version made by other rules.
    """
    for config in sorted(cache_folder.glob(f"[!.]*/{CONFIG}")):
        model = _folder_model(str(config.parent), "converted", config.parent)
        yield replace(model, obstacle="It is the conversion of a .gguf file: give that file.")


def folder_models(folder: Path) -> Iterator[LocalModel]:
    """Yields the models in a folder, or the one that it is: also those of a hub's cache, and in folders within it.

    Raises ValueError when it is no folder.
    """
    if folder.is_file() and folder.suffix == ".gguf":
        yield from _ggufs(folder.parent, [path for path in folder.parent.iterdir() if path == folder])
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is neither a folder nor a .gguf file: name a folder of models")
    if any(folder.glob("models--*--*")):
        yield from hub_models(folder)
        return
    for found in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        if (found / CONFIG).exists() and not holds_gguf(path.name for path in found.iterdir()):
            yield _folder_model(str(found), "folder", found)
        else:
            yield from _ggufs(found, found.glob("*.gguf"))


def _ggufs(folder: Path, files: Iterable[Path]) -> Iterator[LocalModel]:
    for first, parts in gguf_models(path.name for path in files).items():
        yield _gguf_model(str(folder / first), "folder", folder / first, [folder / part for part in parts])


def _cached_gguf(cached: CachedModel, first: str, parts: tuple[str, ...]) -> LocalModel:
    files = [cached.folder / part for part in parts]
    missing = missing_file(cached.folder, first)
    return _gguf_model(f"{cached.name}:{first}", "hub", files[0], files, _partly(missing))


def _gguf_model(name: str, place: str, file: Path, files: list[Path], why: str | None = None) -> LocalModel:
    try:
        architecture = gguf_architecture(file)
        why = why or gguf_obstacle(file)
    except OSError as error:
        architecture, why = "", f"{file} can't be read ({error.strerror})."
    return LocalModel(name, place, file, sum(map(_num_bytes, files)), architecture, why)


def _folder_model(name: str, place: str, folder: Path) -> LocalModel:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return LocalModel(name, place, folder, sum(map(_num_bytes, files)), _architecture(folder), _why_not(folder))


def _why_not(folder: Path) -> str | None:
    try:
        missing = missing_file(folder)
    except (HubError, OSError) as error:
        return str(error)
    if missing in (CONFIG, SINGLE):
        return f"There is no {missing}."
    if (why := _partly(missing) or obstacle(folder)) is not None:
        return why
    return None if has_tokenizer(path.name for path in folder.iterdir()) else "There is no tokenizer."


def _partly(missing: str | None) -> str | None:
    return f"It is there only in part: {missing} is missing." if missing is not None else None


def _architecture(folder: Path) -> str:
    try:
        config = read_object(folder / CONFIG)
    except UnsupportedModel:
        return ""
    names = config.get("architectures")
    found = names[0] if isinstance(names, list) and names else config.get("model_type")
    return found if isinstance(found, str) else ""


def _num_bytes(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
