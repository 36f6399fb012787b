"""Keeps GGUF files as Hugging Face folders, each converted once.

The result lies in a cache folder named after the file's content; from then on a start reads safetensors.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from runner_svc.gguf.conversion import Conversion
from runner_svc.gguf.errors import GgufError
from runner_svc.gguf.parts import part_files
from runner_svc.interface.progress import Progress
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.weights import sample_bytes

# Part of the cache folder's name: raise it when a change here makes older conversions wrong.
CONVERSION_VERSION = 4


def converted_folder(gguf_file: Path, cache_folder: Path, progress: Progress) -> Path:
    """The folder that holds the converted file, which is made unless it exists.

    `gguf_file`: the file, or any part of a model that is split. Raises UnsupportedModel when it can't be served.
    """
    target = cache_folder / f"{part_files(gguf_file)[0].stem}-{_digest(gguf_file)}"
    if target.is_dir():
        return target
    conversion = _planned(gguf_file)
    cache_folder.mkdir(parents=True, exist_ok=True)
    # Made under another name and then renamed: an interrupted conversion leaves nothing that looks whole.
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache_folder))
    try:
        what = f"converting {gguf_file.name} (once)"
        progress(what, 0.0)
        conversion.write(scratch, progress, what)
        progress(what, 1.0)
        try:
            os.rename(scratch, target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def why_not(gguf_file: Path) -> str | None:
    """Why a GGUF file (or any part of a split one) can't be served, from its header alone; None when it can."""
    try:
        _planned(gguf_file)
    except UnsupportedModel as error:
        return str(error)
    return None


def _digest(gguf_file: Path) -> str:
    digest = hashlib.blake2b(digest_size=8, salt=bytes([CONVERSION_VERSION]))
    for part in part_files(gguf_file):
        if part.is_file():
            digest.update(sample_bytes(part))
    return digest.hexdigest()


def _planned(gguf_file: Path) -> Conversion:
    try:
        conversion = Conversion.plan(gguf_file)
        ModelConfig.from_hugging_face(conversion.config)
    except (GgufError, UnsupportedModel) as error:
        raise UnsupportedModel(f"{gguf_file} can't be served: {error}") from error
    return conversion
