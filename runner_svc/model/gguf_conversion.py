"""Converts a GGUF file to a Hugging Face folder in safetensors, once.

transformers needs 20 s to dequantize a small model, so the result is kept in a cache folder named after the file's
content. Later starts read the safetensors without importing transformers.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from pathlib import Path

from runner_svc.interface.progress import Progress
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.folder.cache_folder import writes_cache
from runner_svc.model.gguf_tokenizer import StatedTokenizer, write_stated_tokenizer
from runner_svc.model.weights import sample_bytes

# Part of the cache folder's name. Increase it when a change here invalidates older conversions.
CONVERSION_VERSION = 3


@writes_cache
def converted_folder(gguf_file: Path, cache_folder: Path, progress: Progress) -> Path:
    """Returns the folder of the converted file, converting it unless the folder exists.

    Raises UnsupportedModel if transformers can't read the file.
    """
    digest = hashlib.blake2b(sample_bytes(gguf_file), digest_size=8, salt=bytes([CONVERSION_VERSION])).hexdigest()
    target = cache_folder / f"{gguf_file.stem}-{digest}"
    if target.is_dir():
        return target
    cache_folder.mkdir(parents=True, exist_ok=True)
    # Created under another name and then renamed, so that an interrupted conversion is never taken for a complete one.
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache_folder))
    try:
        _convert(gguf_file, scratch, progress)
        try:
            os.rename(scratch, target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert(gguf_file: Path, folder: Path, progress: Progress) -> None:
    what = f"converting {gguf_file.name} (once)"
    progress(what, 0.0)
    # tqdm reads this on import; its bars would overwrite those of `progress`.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # takes seconds; needed only here

    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    try:
        stated = StatedTokenizer.read(gguf_file)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        progress(what, 0.3)
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype="float32", quantization_config=GgufConfig(dequantize=True)
        )
    except (ImportError, MemoryError):  # a problem of the machine, not of the file
        raise
    except Exception as error:  # transformers raises errors of any type for a file that it can't read
        raise UnsupportedModel(_refusal(gguf_file, error)) from error
    progress(what, 0.9)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_stated_tokenizer(stated, folder)
    _drop_quantization(folder / "config.json")
    progress(what, 1.0)


def _refusal(gguf_file: Path, error: Exception) -> str:
    said = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".:!")
    return (
        f"{gguf_file} can't be converted by transformers {importlib.metadata.version('transformers')}: {said}. "
        "Check that the file is complete, install a newer transformers, or use a folder with config.json and "
        "safetensors."
    )


def _drop_quantization(config_file: Path) -> None:
    """Removes the quantization that transformers still declares, although the saved weights are dequantized."""
    config = json.loads(config_file.read_text())
    config.pop("quantization_config", None)
    config_file.write_text(json.dumps(config, indent=2))
