"""Whether a model folder can be served, from its configuration and the headers of its weights; needs no torch."""

from __future__ import annotations

from pathlib import Path

from runner_svc.model.config import ModelConfig
from runner_svc.model.expected_tensors import check_tensors
from runner_svc.model.folder.checkpoint_files import checkpoint_tensors
from runner_svc.model.folder.config_file import read_config
from runner_svc.model.folder.errors import ModelNotFound, UnsupportedModel


def why_not(folder: Path, *, has_weights: bool = True) -> str | None:
    """Returns the sentence with which a runner would refuse the folder; None where Roster's own decoder serves it.

    Takes milliseconds. The tokenizer and the values of the weights are not looked at; `has_weights=False` asks of
    config.json alone.
    """
    try:
        config = ModelConfig.from_hugging_face(read_config(folder))
        if has_weights:
            check_tensors(checkpoint_tensors(folder), config)
    except (ModelNotFound, UnsupportedModel) as error:
        return str(error)
    return None
