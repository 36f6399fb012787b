"""A gateway's GenerateRequest as a request of our own API, which is then prepared and validated like any other.

proto3 fields without presence arrive as 0 when a gateway leaves them out: for those whose 0 our API refuses (`top_p`,
`repetition_penalty`, `n`) 0 means the default, as in vLLM. What Roster doesn't do is refused, never ignored.
"""

from __future__ import annotations

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from roster_protos import inference_pb2
from scheduler_svc.constrained.process.structural_tag import tagged_text
from scheduler_svc.constrained.source import UnusableGrammar, any_of
from scheduler_svc.front.base.refusal import invalid

SEED_MASK = (1 << 64) - 1
"""Seeds are signed there and 64 bits without a sign here."""

ANY_OBJECT = '{"type": "object"}'

_COPIED = ("min_p", "frequency_penalty", "presence_penalty")
_ZERO_IS_DEFAULT = ("top_p", "repetition_penalty", "top_k")
_LOGPROBS = ("logprobs", "prompt_logprobs")


def to_generate_request(asked: vllm.GenerateRequest) -> inference_pb2.GenerateRequest:
    """Our form of the request. Raises Refusal (INVALID_ARGUMENT) for what Roster can't do."""
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
    request.output.skip_special_tokens = params.skip_special_tokens
    for name in _LOGPROBS:
        if params.HasField(name):
            _map_logprobs(name, getattr(params, name), request.output)
    return request


def _refuse_unsupported(asked: vllm.GenerateRequest) -> None:
    params = asked.sampling_params
    if asked.HasField("mm_inputs") or asked.extra_mm_inputs or asked.HasField("media_refs"):
        raise invalid("mm_inputs", "this server reads text only; leave images, audio and video out")
    if asked.HasField("kv_transfer_params") or asked.HasField("kv_transfer_params_json"):
        raise invalid("kv_transfer_params", "this server transfers no KV between workers; use it as a regular worker")
    if asked.data_parallel_rank > 0:
        raise invalid("data_parallel_rank", f"this server has rank 0 only, and {asked.data_parallel_rank} is asked for")
    if params.HasField("truncate_prompt_tokens"):
        raise invalid("sampling_params.truncate_prompt_tokens", "this server cuts no prompts; shorten it yourself")


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
            raise invalid("sampling_params.logit_bias", f"{token} is no token id; they start at 0")
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
        raise invalid(f"sampling_params.{name}", f"{top} asks for the whole vocabulary; ask for 0 to 20 alternatives")
    setattr(output, name, top)
