"""Timed cases of sampling, as the records that the kernels read. Imports no CUDA."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from runner_svc.sampling.sample_records import SAMPLE_RECORD

BIASED_IDS = 300
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "top_k 50, top_p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "min_p 0.1": {"temperature": 1.0, "least_scaled": math.log(0.1)},
    f"logit bias of {BIASED_IDS} ids": {"temperature": 1.0, "bias_count": BIASED_IDS},
    "penalties, 2048 tokens": {"temperature": 1.0, "frequency_penalty": 0.1, "prompt_len": 512, "position": 2048},
}
"""Fields of the records that differ from those of a greedy row."""
_ADJUSTING = {"frequency_penalty", "bias_count"}


def sample_records(num_rows: int, parameters: Mapping[str, float]) -> NDArray[np.void]:
    """Returns SAMPLE_RECORD [num_rows]; rows with a bias share the ids."""
    records = np.zeros(num_rows, SAMPLE_RECORD)
    records["top_p"], records["repetition_penalty"], records["least_scaled"] = 1, 1, -np.inf
    records["seed"], records["slot"] = np.arange(num_rows), np.arange(num_rows)
    records["position"], records["adjusted"] = 100, bool(_ADJUSTING & parameters.keys())
    for field, value in parameters.items():
        records[field] = value
    return records
