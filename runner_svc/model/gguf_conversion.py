"""Converts a GGUF file to a Hugging Face folder in safetensors, once.

transformers needs 20 s to dequantize a small model, so the result is kept in a cache folder named after the file's
content; from then on a start reads safetensors, without importing transformers at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.weights import Progress, sample_bytes

# Part of the cache folder's name: raise it when a change here makes older conversions wrong.
CONVERSION_VERSION = 2
# Pre-tokenizers by a GGUF file's `tokenizer.ggml.pre` that transformers rebuilds as a plain ByteLevel: numbers would
# be split into other ids than the model was trained on.
_DIGITS_THEN_BYTES = {"smollm"}
# Vocabularies by `tokenizer.ggml.model` whose tokens are spelled in bytes, and decoded as such: some versions of
# transformers put a decoder for SentencePiece around that.
_BYTE_LEVEL = {"gpt2"}


def converted_folder(gguf_file: Path, cache_folder: Path, progress: Progress) -> Path:
    """The folder that holds the converted file, which is made unless it exists.

    Raises UnsupportedModel when transformers can't read the file.
    """
    digest = hashlib.blake2b(sample_bytes(gguf_file), digest_size=8, salt=bytes([CONVERSION_VERSION])).hexdigest()
    target = cache_folder / f"{gguf_file.stem}-{digest}"
    if target.is_dir():
        return target
    cache_folder.mkdir(parents=True, exist_ok=True)
    # Made under another name and then renamed: an interrupted conversion leaves nothing that looks whole.
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache_folder))
    try:
        _convert(gguf_file, scratch, progress)
        try:
            os.rename(scratch, target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert(gguf_file: Path, folder: Path, progress: Progress) -> None:
    what = f"converting {gguf_file.name} (once)"
    progress(what, 0.0)
    # Read when tqdm is first imported: its own bars would be drawn over what `progress` shows.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # seconds, and only needed here

    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        progress(what, 0.3)
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype="float32", quantization_config=GgufConfig(dequantize=True)
        )
    except (ValueError, KeyError, NotImplementedError, OSError) as error:
        raise UnsupportedModel(f"{gguf_file} can't be converted: {error}") from error
    _restore_text_steps(tokenizer.backend_tokenizer, gguf_file)
    progress(what, 0.9)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _drop_quantization(folder / "config.json")
    progress(what, 1.0)


def _restore_text_steps(tokenizer: Any, gguf_file: Path) -> None:
    """Gives the tokenizer (of the library `tokenizers`) the steps that the file names and transformers gets wrong."""
    from gguf import GGUFReader
    from tokenizers import decoders, pre_tokenizers

    reader = GGUFReader(gguf_file)
    fields = (reader.get_field(name) for name in ("tokenizer.ggml.pre", "tokenizer.ggml.model"))
    splitting, vocabulary = (str(field.contents()) if field else "" for field in fields)
    if splitting in _DIGITS_THEN_BYTES:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if vocabulary in _BYTE_LEVEL:
        tokenizer.decoder = decoders.ByteLevel()


def _drop_quantization(config_file: Path) -> None:
    """What was saved is dequantized, whatever transformers still says about it."""
    config = json.loads(config_file.read_text())
    config.pop("quantization_config", None)
    config_file.write_text(json.dumps(config, indent=2))
