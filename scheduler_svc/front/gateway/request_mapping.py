"""Converts a gateway's GenerateRequest into Roster's, which is then prepared and validated like any other.

proto3 fields without presence arrive as 0 when a gateway omits them. For fields for which Roster's API refuses 0
(`top_p`, `repetition_penalty`, `n`), 0 means the default, as in vLLM. Unsupported options are refused, never ignored.
"""

from __future__ import annotations

import json
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from roster_protos import inference_pb2
from scheduler_svc.constrained.process.structural_tag import tagged_text
from scheduler_svc.constrained.source import UnusableGrammar, any_of
from scheduler_svc.front.base.refusal import invalid
from scheduler_svc.front.gateway.tool_schemas import with_objects

SEED_MASK = (1 << 64) - 1
"""Maps the gateway's signed 64-bit seeds to Roster's unsigned ones."""

ANY_OBJECT = '{"type": "object"}'

_COPIED = ("min_p", "frequency_penalty", "presence_penalty")
_ZERO_IS_DEFAULT = ("top_p", "repetition_penalty", "top_k")
_HINTS: dict[str, tuple[Any, str]] = {
    "conversation_id": (str, "a string"),
    "kv_retain_s": (int | float, "a number of seconds"),
    "next_turn_s": (int | float, "a number of seconds"),
}
_LOGPROBS = ("logprobs", "prompt_logprobs")


def to_generate_request(asked: vllm.GenerateRequest) -> inference_pb2.GenerateRequest:
    """Returns Roster's form of the request. Raises Refusal (INVALID_ARGUMENT) for unsupported options."""
    _refuse_unsupported(asked)
    params = asked.sampling_params
    request = inference_pb2.GenerateRequest(request_id=asked.request_id)
    if asked.WhichOneof("input") == "tokenized":
        request.prompt.token_ids.ids.extend(asked.tokenized.input_ids)
    elif asked.WhichOneof("input") == "text":
        request.prompt.text = asked.text
    if params.n:
        request.n = params.n
    _map_sampling(params, request.sampling)
    _map_stop(params, request.stop)
    _map_constraint(params, request)
    if asked.HasField("kv_transfer_params_json"):
        _map_hints(asked.kv_transfer_params_json, request)
    request.output.skip_special_tokens = params.skip_special_tokens
    for name in _LOGPROBS:
        if params.HasField(name):
            _map_logprobs(name, getattr(params, name), request.output)
    return request


def _refuse_unsupported(asked: vllm.GenerateRequest) -> None:
    params = asked.sampling_params
    if asked.HasField("mm_inputs") or asked.extra_mm_inputs or asked.HasField("media_refs"):
        raise invalid("mm_inputs", "this server supports text only; remove images, audio and video")
    if asked.HasField("kv_transfer_params"):
        raise invalid(
            "kv_transfer_params", "this server does not transfer KV between workers; configure it as a regular worker"
        )
    if asked.data_parallel_rank > 0:
        raise invalid("data_parallel_rank", f"rank {asked.data_parallel_rank} does not exist; this server has rank 0")
    if params.HasField("truncate_prompt_tokens"):
        raise invalid(
            "sampling_params.truncate_prompt_tokens", "this server does not truncate prompts; shorten the prompt"
        )


def _map_hints(text: str, request: inference_pb2.GenerateRequest) -> None:
    """Sets the hints of a conversation, the only keys that `kv_transfer_params` may have here."""
    try:
        hints = json.loads(text)
    except ValueError as error:
        raise invalid("kv_transfer_params_json", f"it is not JSON: {error}") from error
    if not isinstance(hints, dict) or not set(hints) <= set(_HINTS):
        raise invalid(
            "kv_transfer_params",
            "this server does not transfer KV between workers; configure it as a regular worker, and send at most "
            f"{', '.join(_HINTS)}",
        )
    for name, value in hints.items():
        kind, words = _HINTS[name]
        if isinstance(value, bool) or not isinstance(value, kind):
            raise invalid(f"kv_transfer_params.{name}", f"it is {value!r}; send {words}")
        setattr(request, name, value)


def _map_sampling(params: vllm.SamplingParams, sampling: inference_pb2.SamplingParameters) -> None:
    if params.HasField("temperature"):
        sampling.temperature = params.temperature
    if params.HasField("seed"):
        sampling.seed = params.seed & SEED_MASK
    for name in _COPIED:
        setattr(sampling, name, getattr(params, name))
    for name in _ZERO_IS_DEFAULT:
        if value := getattr(params, name):
            setattr(sampling, name, value)
    for token, bias in params.logit_bias.items():
        if token < 0:
            raise invalid("sampling_params.logit_bias", f"{token} is not a token id; token ids start at 0")
        sampling.logit_bias[token] = bias


def _map_stop(params: vllm.SamplingParams, stop: inference_pb2.StopConditions) -> None:
    if params.HasField("max_tokens"):
        stop.max_tokens = params.max_tokens
    stop.min_tokens = params.min_tokens
    stop.strings.extend(params.stop)
    stop.token_ids.extend(params.stop_token_ids)
    stop.ignore_eos = params.ignore_eos
    stop.include_stop_string = params.include_stop_str_in_output


def _map_constraint(params: vllm.SamplingParams, request: inference_pb2.GenerateRequest) -> None:
    kind = params.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not params.json_object):
        return
    constraint = request.constraint
    if kind == "json_object":
        constraint.json_schema = ANY_OBJECT
    elif kind == "json_schema":
        constraint.json_schema = with_objects(params.json_schema)
    elif kind == "choice":
        constraint.grammar = any_of(list(params.choice.choices))
    elif kind == "structural_tag":
        try:
            constraint.grammar = tagged_text(params.structural_tag)
        except UnusableGrammar as error:
            raise invalid("sampling_params.structural_tag", str(error)) from error
    else:
        setattr(constraint, kind, getattr(params, kind))


def _map_logprobs(name: str, top: int, output: inference_pb2.OutputOptions) -> None:
    if top < 0:
        raise invalid(f"sampling_params.{name}", f"{top} requests the whole vocabulary; request 0 to 20 alternatives")
    setattr(output, name, top)
