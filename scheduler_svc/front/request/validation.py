"""Checks a GenerateRequest and resolves its defaults, before it can affect other requests.

Every refusal names the field by its path in the public message and says what to change. Cheap checks precede expensive
ones: unsupported features, parameters and sizes, then the prompt's tokens, then the limits that depend on their number,
then the constraint, which is compiled later on behalf of the engine.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from roster_protos import engine_pb2, inference_pb2, plan_pb2
from scheduler_svc.front.base.little_endian import int32_bytes, int32_list
from scheduler_svc.front.base.refusal import invalid, unimplemented
from scheduler_svc.front.base.value_range import check_range
from scheduler_svc.front.request.constraint import constraint_source
from scheduler_svc.front.request.prompt_tokens import check_ids, prompt_tokens
from scheduler_svc.front.request.sampling_parameters import resolve_sampling
from scheduler_svc.front.text.tokenizer import ModelText

MAX_REQUEST_ID_BYTES = 128
MAX_CACHE_SALT_BYTES = 128
"""Long enough for several UUIDs or a digest; both are kept as long as the request."""
MAX_CONVERSATION_ID_BYTES = 128
MAX_HINT_S = 86_400.0
"""A day: longer than any cache keeps anything."""
MAX_CHOICES = 64
"""Each is a sequence; a quarter of a GPU's default slots."""
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_BYTES = 256
"""Their product bounds the automaton's states, 16,384 a request."""
MAX_KEEP_MS = 3_600_000
"""An hour: a request that a client leaves behind must not compute for ever."""
MAX_INT32 = 2**31 - 1
"""Token counts and ids are int32 columns on the link."""
DEFAULT_KEEP_MS = 60_000
"""A minute, as `retention_s` by default."""


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request for the engine, with every default filled in and every limit applied."""

    body: inference_pb2.GenerateRequest
    """The request as the client sent it."""
    request_id: str
    """The client's id, or a random one."""
    prompt: list[int]
    """Token ids, at least one."""
    received: list[int]
    """Tokens that an earlier attempt delivered."""
    sampling: plan_pb2.Sampling
    """Sampling parameters; `stop_ids` includes the end-of-sequence tokens unless they are ignored."""
    n: int
    """Number of choices, 1 to 64."""
    max_tokens: int
    """Maximum number of tokens per choice, with received ones, at least 1. With the prompt, they fit context and pool.

    A continuation with an explicit `max_tokens` may exceed the pool.
    """
    timeout_ms: int | None
    """Milliseconds from now until the request expires; None for never."""
    keep_ms: int
    """Milliseconds for which the request is kept after its client disconnects; 0 to end it then."""
    grammar: str = ""
    """The output's constraint, as the client wrote it; "" for none."""
    grammar_kind: str = ""
    """Kind of the constraint: a field of roster.v1.Constraint."""

    def to_submit(self, handle: int, tenant: str) -> engine_pb2.Submit:
        """Returns the request in the engine's form.

        `handle` identifies the request between worker and engine; `tenant` is the namespace of its id.
        """
        body = self.body
        submit = engine_pb2.Submit(
            handle=handle,
            tenant=tenant,
            request_id=self.request_id,
            digest=digest(body),
            body=body.SerializeToString(),
            prompt=int32_bytes(self.prompt),
            received=int32_bytes(self.received),
            sampling=self.sampling,
            n=self.n,
            max_tokens=self.max_tokens,
            priority=body.priority,
            keep_ms=self.keep_ms,
            cache_salt=body.cache_salt,
            grammar=self.grammar,
            open_ended=not body.stop.HasField("max_tokens"),
            grammar_kind=self.grammar_kind,
            no_speculation=body.HasField("speculate") and not body.speculate,
        )
        if body.sampling.HasField("seed"):
            submit.seed = body.sampling.seed
        if body.HasField("ttft_target_ms"):
            submit.ttft_target_ms = body.ttft_target_ms
        if body.HasField("itl_target_ms"):
            submit.itl_target_ms = body.itl_target_ms
        submit.conversation_id = body.conversation_id
        if body.HasField("kv_retain_s"):
            submit.kv_retain_s = body.kv_retain_s
        if body.HasField("next_turn_s"):
            submit.next_turn_s = body.next_turn_s
        if self.timeout_ms is not None:
            submit.timeout_ms = self.timeout_ms
        return submit


def digest(body: inference_pb2.GenerateRequest) -> bytes:
    """Returns the SHA-256 of a request's body, which distinguishes a retry from another request with the same id.

    It covers all fields except the id: parameters as sent (an explicit default differs from an absent one), targets,
    and received_token_ids. A continuation is therefore never mistaken for the request that it continues; a client
    returns to a request that still exists with Attach.
    """
    nameless = inference_pb2.GenerateRequest()
    nameless.CopyFrom(body)
    nameless.ClearField("request_id")
    return hashlib.sha256(nameless.SerializeToString(deterministic=True)).digest()


def validate(
    request: inference_pb2.GenerateRequest,
    text: ModelText,
    pool_tokens: int,
    remaining_ms: int | None = None,
    usual_tokens: int = 0,
) -> ValidRequest:
    """Checks a request against the API's ranges, the model and the pool.

    `pool_tokens`: maximum length of a sequence on the largest runner. `remaining_ms`: milliseconds until the
    deadline of the call, None if it has none. `usual_tokens`: replaces `pool_tokens` for a request without
    max_tokens, unless it is 0. Raises Refusal.
    """
    _check_envelope(request)
    n = request.n if request.HasField("n") else 1
    check_range(n, "n", 1, MAX_CHOICES)
    _check_stop(request.stop, text.vocab_size)
    received = list(request.received_token_ids)
    if received and n != 1:
        raise invalid("n", f"received_token_ids continue one choice, but n is {n}; set n to 1")
    check_ids(received, "received_token_ids", text.vocab_size)
    sampling = resolve_sampling(request, text)
    prompt = prompt_tokens(request.prompt, text)
    max_tokens = _max_tokens(request, len(prompt), text.context_length, pool_tokens, usual_tokens or pool_tokens)
    if sampling.min_tokens > max_tokens:
        raise invalid(
            "stop.min_tokens", f"{sampling.min_tokens} is more than the {max_tokens} tokens that can be generated"
        )
    _check_received(received, sampling, max_tokens)
    grammar_kind, grammar = constraint_source(request)
    keeps = request.on_disconnect == inference_pb2.ON_DISCONNECT_KEEP
    return ValidRequest(
        body=request,
        request_id=request.request_id or secrets.token_hex(16),
        prompt=prompt,
        received=received,
        sampling=sampling,
        n=n,
        max_tokens=max_tokens,
        timeout_ms=_timeout_ms(request, remaining_ms),
        keep_ms=(request.keep_ms if request.HasField("keep_ms") else DEFAULT_KEEP_MS) if keeps else 0,
        grammar=grammar,
        grammar_kind=grammar_kind,
    )


def _check_envelope(request: inference_pb2.GenerateRequest) -> None:
    """Checks unsupported features and all fields that do not concern the generation itself."""
    if request.adapter:
        raise unimplemented("adapter", "this server does not support adapters; omit it")
    size = len(request.request_id.encode())
    if size > MAX_REQUEST_ID_BYTES:
        raise invalid("request_id", f"it has {size} bytes; use at most {MAX_REQUEST_ID_BYTES}")
    size = len(request.cache_salt.encode())
    if size > MAX_CACHE_SALT_BYTES:
        raise invalid("cache_salt", f"it has {size} bytes; use at most {MAX_CACHE_SALT_BYTES}")
    check_conversation_id(request.conversation_id)
    for hint in ("kv_retain_s", "next_turn_s"):
        if request.HasField(hint):  # type: ignore[arg-type]
            check_range(getattr(request, hint), hint, 0, MAX_HINT_S)
    check_range(request.priority, "priority", -100, 100)
    for field in ("ttft_target_ms", "itl_target_ms", "timeout_ms"):
        if request.HasField(field) and getattr(request, field) == 0:  # type: ignore[arg-type]
            raise invalid(field, "it is 0; set at least 1 millisecond, or omit it")
        _check_signed(getattr(request, field), field)
    if request.on_disconnect not in inference_pb2.OnDisconnect.values():
        raise invalid("on_disconnect", f"{int(request.on_disconnect)} is not a known value; use cancel or keep")
    if request.HasField("keep_ms"):
        check_range(request.keep_ms, "keep_ms", 1, MAX_KEEP_MS)


def check_conversation_id(conversation_id: str) -> None:
    """Raises Refusal if the id is too long."""
    size = len(conversation_id.encode())
    if size > MAX_CONVERSATION_ID_BYTES:
        raise invalid("conversation_id", f"it has {size} bytes; use at most {MAX_CONVERSATION_ID_BYTES}")


def _check_signed(value: int, field: str) -> None:
    """Refuses values that result from -1 wrapped to an unsigned integer by the client's language."""
    if value > MAX_INT32:
        raise invalid(field, f"{value} exceeds the int32 maximum, {MAX_INT32}; omit the field for no limit")


def _check_stop(stop: inference_pb2.StopConditions, vocab_size: int) -> None:
    if stop.HasField("max_tokens") and stop.max_tokens < 1:
        raise invalid("stop.max_tokens", "it is 0; generate at least 1 token")
    _check_signed(stop.max_tokens, "stop.max_tokens")
    _check_signed(stop.min_tokens, "stop.min_tokens")
    if stop.HasField("max_tokens") and stop.min_tokens > stop.max_tokens:
        raise invalid("stop.min_tokens", f"{stop.min_tokens} is more than stop.max_tokens, {stop.max_tokens}")
    if len(stop.strings) > MAX_STOP_STRINGS:
        raise invalid("stop.strings", f"it has {len(stop.strings)} strings; send at most {MAX_STOP_STRINGS}")
    for index, string in enumerate(stop.strings):
        size = len(string.encode())
        if not 1 <= size <= MAX_STOP_STRING_BYTES:
            raise invalid(
                f"stop.strings[{index}]", f"it has {size} bytes; a stop string must have 1 to {MAX_STOP_STRING_BYTES}"
            )
    check_ids(stop.token_ids, "stop.token_ids", vocab_size)


def _max_tokens(
    request: inference_pb2.GenerateRequest, prompt_len: int, context_length: int, pool_tokens: int, usual_tokens: int
) -> int:
    """Returns the maximum number of tokens to generate: as requested, cut to the context, or all that context and pool
    allow.

    Raises Refusal if the request can never fit the largest runner.
    """
    most = context_length - prompt_len
    if request.received_token_ids and request.stop.HasField("max_tokens"):
        return min(request.stop.max_tokens, most)  # it has begun: if it fits no present runner, it waits for one
    room = pool_tokens - prompt_len
    if room < 1:
        raise invalid(
            "prompt",
            f"it has {prompt_len} tokens, but a sequence on the largest runner has at most {pool_tokens}, output "
            "included; shorten the prompt",
        )
    if not request.stop.HasField("max_tokens"):
        usual = usual_tokens - prompt_len
        return min(most, usual if usual > 0 else room)
    asked = min(request.stop.max_tokens, most)
    if asked > room:
        raise invalid(
            "stop.max_tokens",
            f"{prompt_len} prompt tokens and {asked} generated tokens do not fit the largest runner, which holds at "
            f"most {pool_tokens} tokens of one sequence; set it to at most {room}",
        )
    return asked


def _check_received(received: list[int], sampling: plan_pb2.Sampling, max_tokens: int) -> None:
    """Refuses received tokens that a choice can't have generated.

    The tokens of a complete choice are valid: the engine ends it at once.
    """
    if len(received) > max_tokens:
        raise invalid(
            "received_token_ids", f"it has {len(received)} tokens, but a choice has at most {max_tokens}; send fewer"
        )
    stops = set(int32_list(sampling.stop_ids))
    for index in range(sampling.min_tokens, len(received) - 1):
        if received[index] in stops:
            raise invalid(
                f"received_token_ids[{index}]", f"{received[index]} ends a choice, but other tokens follow it"
            )


def _timeout_ms(request: inference_pb2.GenerateRequest, remaining_ms: int | None) -> int | None:
    """Returns the shorter of the request's timeout and the time to the call's deadline."""
    limits = [request.timeout_ms] if request.HasField("timeout_ms") else []
    if remaining_ms is not None:
        limits.append(min(max(remaining_ms, 1), 2**32 - 1))
    return min(limits, default=None)
