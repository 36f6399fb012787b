"""Whether a GGUF model can be served, from the headers of its files; needs no torch."""

from __future__ import annotations

from pathlib import Path

from runner_svc.gguf.conversion import Conversion
from runner_svc.gguf.errors import GgufError
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel


def why_not(gguf_file: Path) -> str | None:
    """Returns the reason why a GGUF model can't be served, from its header, or None if it can.

    `gguf_file`: the file, or any part of a split model.
    """
    try:
        planned_conversion(gguf_file)
    except UnsupportedModel as error:
        return str(error)
    return None


def planned_conversion(gguf_file: Path) -> Conversion:
    """Returns the plan of the conversion of a model that can be served. Raises UnsupportedModel for another one."""
    try:
        conversion = Conversion.plan(gguf_file)
    except GgufError as error:
        raise UnsupportedModel(f"{gguf_file} can't be served: {error}") from error
    try:
        ModelConfig.from_hugging_face(conversion.config)
    except UnsupportedModel as error:
        factors = "short_factor" in conversion.config["rope_parameters"]
        cause = "Its tensors of RoPE factors are not those of llama3. " if factors else ""
        raise UnsupportedModel(f"{gguf_file} can't be served: {cause}{error}") from error
    return conversion
