"""Converts a GGUF model to a Hugging Face folder in safetensors, once.

The result is kept in a cache folder named after the content of the file. Later starts read the safetensors. Matrices of
large models stay in the file's blocks (`runner_svc.gguf.kept_blocks`), others become plain numbers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from runner_svc.gguf.parts import part_files
from runner_svc.interface.progress import Progress
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.folder.cache_folder import writes_cache
from runner_svc.model.folder.file_samples import sample_bytes
from runner_svc.model.gguf_servable import planned_conversion

# Part of the cache folder's name. Increase it when a change invalidates older conversions.
CONVERSION_VERSION = 5


@writes_cache
def converted_folder(gguf_file: Path, cache_folder: Path, progress: Progress) -> Path:
    """Returns the folder of the converted model, converting it unless the folder exists.

    `gguf_file`: the file, or any part of a split model. Raises UnsupportedModel if it can't be served.
    """
    target = cache_folder / f"{part_files(gguf_file)[0].stem}-{_digest(gguf_file)}"
    if target.is_dir():
        return target
    conversion = planned_conversion(gguf_file)
    cache_folder.mkdir(parents=True, exist_ok=True)
    # Created under another name and then renamed, so that an interrupted conversion is never taken for a complete one.
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache_folder))
    try:
        what = f"converting {gguf_file.name} (once)"
        progress(what, 0.0)
        conversion.write(scratch, progress, what)
        progress(what, 1.0)
        try:
            os.rename(scratch, target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _digest(gguf_file: Path) -> str:
    digest = hashlib.blake2b(digest_size=8, salt=bytes([CONVERSION_VERSION]))
    try:
        for part in part_files(gguf_file):
            if part.is_file():
                digest.update(sample_bytes(part))
    except OSError as error:
        raise UnsupportedModel(f"{gguf_file} can't be served: It can't be read: {error.strerror}.") from error
    return digest.hexdigest()
