"""Checks the public sampling parameters and resolves them into the runner's."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roster_protos import inference_pb2, plan_pb2
from scheduler_svc.front.base.little_endian import int32_bytes
from scheduler_svc.front.base.refusal import invalid
from scheduler_svc.front.base.value_range import check_range
from scheduler_svc.front.text.tokenizer import ModelText

MAX_BIASED_TOKENS = 1024
"""Maximum number of entries of a `logit_bias`, which the runner holds for each sequence."""
MAX_BIAS = 100.0
"""As in OpenAI's API: such a bias forces or forbids a token."""
MAX_STOP_TOKENS = 64
"""As many as stop strings; the scheduler compares each drawn token with them."""
MAX_LOGPROBS = 20
"""As in OpenAI's API."""


class _Parameter(NamedTuple):
    default: float
    least: float
    most: float
    above_least: bool = False


_PARAMETERS = {
    "temperature": _Parameter(1.0, 0.0, 100.0),
    "top_p": _Parameter(1.0, 0.0, 1.0, above_least=True),
    "min_p": _Parameter(0.0, 0.0, 1.0),
    "repetition_penalty": _Parameter(1.0, 0.0, 10.0, above_least=True),
    "presence_penalty": _Parameter(0.0, -10.0, 10.0),
    "frequency_penalty": _Parameter(0.0, -10.0, 10.0),
}


def resolve_sampling(request: inference_pb2.GenerateRequest, text: ModelText) -> plan_pb2.Sampling:
    """Returns the runner's parameters with defaults filled in. Raises Refusal for values that are out of range."""
    asked = request.sampling
    sampling = plan_pb2.Sampling()
    for name, parameter in _PARAMETERS.items():
        value = getattr(asked, name) if asked.HasField(name) else parameter.default  # type: ignore[arg-type]
        check_range(value, f"sampling.{name}", parameter.least, parameter.most, parameter.above_least)
        setattr(sampling, name, value)
    sampling.top_k = asked.top_k if asked.top_k < text.vocab_size else 0
    sampling.bias_ids, sampling.bias_values = _bias(asked, text.vocab_size)
    sampling.min_tokens = request.stop.min_tokens
    sampling.stop_ids = _stop_ids(request.stop, text.eos_token_ids)
    for name in ("logprobs", "prompt_logprobs"):
        if request.output.HasField(name):  # type: ignore[arg-type]
            top = getattr(request.output, name)
            check_range(top, f"output.{name}", 0, min(MAX_LOGPROBS, text.vocab_size))
            setattr(sampling, name, top)
    return sampling


def _bias(asked: inference_pb2.SamplingParameters, vocab_size: int) -> tuple[bytes, bytes]:
    """Returns the biased ids in ascending order as int32, and their biases as float32."""
    bias = asked.logit_bias
    if len(bias) > MAX_BIASED_TOKENS:
        raise invalid("sampling.logit_bias", f"it has {len(bias)} entries; send at most {MAX_BIASED_TOKENS}")
    ids = sorted(bias)
    for token in ids:
        if token >= vocab_size:
            raise invalid(
                f"sampling.logit_bias[{token}]",
                f"{token} is not a token of this model; token ids are 0 to {vocab_size - 1}",
            )
        check_range(bias[token], f"sampling.logit_bias[{token}]", -MAX_BIAS, MAX_BIAS)
    values = [bias[token] for token in ids]
    return int32_bytes(ids), np.asarray(values, dtype="<f4").tobytes()


def _stop_ids(stop: inference_pb2.StopConditions, eos_token_ids: tuple[int, ...]) -> bytes:
    """Returns the ids that end a choice in ascending order as int32."""
    if len(stop.token_ids) > MAX_STOP_TOKENS:
        raise invalid("stop.token_ids", f"it has {len(stop.token_ids)} ids; send at most {MAX_STOP_TOKENS}")
    ids = set(stop.token_ids) if stop.ignore_eos else {*stop.token_ids, *eos_token_ids}
    return int32_bytes(sorted(ids))
