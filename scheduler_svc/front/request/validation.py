"""Checks a GenerateRequest and resolves its defaults, before it costs anybody else anything.

Every refusal names the field by its path in the public message and says what to change. The checks go from cheap to
dear: what the server doesn't do, parameters, sizes, then the tokens of the prompt, then what depends on their number,
then the constraint, which the engine has compiled.
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
MAX_CHOICES = 64
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_BYTES = 256
MAX_KEEP_MS = 3_600_000
MAX_INT32 = 2**31 - 1
DEFAULT_KEEP_MS = 60_000


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that the engine can take: every default filled in, every limit applied."""

    body: inference_pb2.GenerateRequest
    """As the client sent it."""
    request_id: str
    """The client's, or one drawn here."""
    prompt: list[int]
    """Token ids, at least one."""
    received: list[int]
    """Tokens that an earlier attempt delivered."""
    sampling: plan_pb2.Sampling
    """How tokens are drawn; `stop_ids` holds the end-of-sequence tokens too unless they are ignored."""
    n: int
    """Choices, 1 to 64."""
    max_tokens: int
    """Most tokens per choice, received ones included, at least 1; prompt and these fit context and pool."""
    timeout_ms: int | None
    """Milliseconds from now until the request expires; None: never."""
    keep_ms: int
    """Milliseconds that it outlives its stream; 0: not at all."""
    grammar: str = ""
    """What the output must match, as the client wrote it; "" for anything."""
    grammar_kind: str = ""
    """How that is written: a field of roster.v1.Constraint."""

    def to_submit(self, handle: int, tenant: str) -> engine_pb2.Submit:
        """The engine's form of it. `handle` names the request between worker and engine; `tenant` owns its id."""
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
        )
        if body.sampling.HasField("seed"):
            submit.seed = body.sampling.seed
        if body.HasField("ttft_target_ms"):
            submit.ttft_target_ms = body.ttft_target_ms
        if body.HasField("itl_target_ms"):
            submit.itl_target_ms = body.itl_target_ms
        if self.timeout_ms is not None:
            submit.timeout_ms = self.timeout_ms
        return submit


def digest(body: inference_pb2.GenerateRequest) -> bytes:
    """SHA-256 of a request's body, by which the engine tells a retry from another request with the same id.

    Everything counts but the id itself: parameters as sent (an explicit default differs from an absent one), targets,
    and received_token_ids, so that a continuation is not taken for the request that it continues (Attach is how to get
    back to one that is still there).
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

    `pool_tokens`: most tokens of one sequence that some runner can hold. `remaining_ms`: milliseconds until the call's
    own deadline, None without one. `usual_tokens`: `pool_tokens` for a request that sets no max_tokens; 0: the same.
    Raises Refusal.
    """
    _check_envelope(request)
    n = request.n if request.HasField("n") else 1
    check_range(n, "n", 1, MAX_CHOICES)
    _check_stop(request.stop, text.vocab_size)
    received = list(request.received_token_ids)
    if received and n != 1:
        raise invalid("n", f"received_token_ids continue one choice, and n is {n}; set n to 1")
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
    """What the server doesn't do, and everything around the generation itself."""
    if request.adapter:
        raise unimplemented("adapter", "this server has no adapters; leave it out")
    size = len(request.request_id.encode())
    if size > MAX_REQUEST_ID_BYTES:
        raise invalid("request_id", f"it has {size} bytes; use at most {MAX_REQUEST_ID_BYTES}")
    size = len(request.cache_salt.encode())
    if size > MAX_CACHE_SALT_BYTES:
        raise invalid("cache_salt", f"it has {size} bytes; use at most {MAX_CACHE_SALT_BYTES}")
    check_range(request.priority, "priority", -100, 100)
    for field in ("ttft_target_ms", "itl_target_ms", "timeout_ms"):
        if request.HasField(field) and getattr(request, field) == 0:  # type: ignore[arg-type]
            raise invalid(field, "it is 0; set at least 1 millisecond, or leave it out")
        _check_signed(getattr(request, field), field)
    if request.on_disconnect not in inference_pb2.OnDisconnect.values():
        raise invalid("on_disconnect", f"this server knows no value {int(request.on_disconnect)}; use cancel or keep")
    if request.HasField("keep_ms"):
        check_range(request.keep_ms, "keep_ms", 1, MAX_KEEP_MS)


def _check_signed(value: int, field: str) -> None:
    """Refuses what -1 becomes where a client's language wraps it."""
    if value > MAX_INT32:
        raise invalid(field, f"{value} is more than an int32 holds, {MAX_INT32}; if you mean no limit, leave it out")


def _check_stop(stop: inference_pb2.StopConditions, vocab_size: int) -> None:
    if stop.HasField("max_tokens") and stop.max_tokens < 1:
        raise invalid("stop.max_tokens", "it is 0; generate at least 1 token")
    _check_signed(stop.max_tokens, "stop.max_tokens")
    _check_signed(stop.min_tokens, "stop.min_tokens")
    if stop.HasField("max_tokens") and stop.min_tokens > stop.max_tokens:
        raise invalid("stop.min_tokens", f"{stop.min_tokens} is more than stop.max_tokens, {stop.max_tokens}")
    if len(stop.strings) > MAX_STOP_STRINGS:
        raise invalid("stop.strings", f"there are {len(stop.strings)} stop strings; send at most {MAX_STOP_STRINGS}")
    for index, string in enumerate(stop.strings):
        size = len(string.encode())
        if not 1 <= size <= MAX_STOP_STRING_BYTES:
            raise invalid(
                f"stop.strings[{index}]", f"it has {size} bytes; a stop string has 1 to {MAX_STOP_STRING_BYTES}"
            )
    check_ids(stop.token_ids, "stop.token_ids", vocab_size)


def _max_tokens(
    request: inference_pb2.GenerateRequest, prompt_len: int, context_length: int, pool_tokens: int, usual_tokens: int
) -> int:
    """Tokens to generate at most: what was asked, cut to the context; by default all that context and pool allow."""
    most = context_length - prompt_len
    if request.received_token_ids and request.stop.HasField("max_tokens"):
        return min(request.stop.max_tokens, most)  # it was begun: where no runner holds it now, it waits for one
    room = pool_tokens - prompt_len
    if room < 1:
        raise invalid(
            "prompt",
            f"it has {prompt_len} tokens, and the largest runner holds at most {pool_tokens} of one sequence, output "
            "included; shorten it",
        )
    if not request.stop.HasField("max_tokens"):
        usual = usual_tokens - prompt_len
        return min(most, usual if usual > 0 else room)
    asked = min(request.stop.max_tokens, most)
    if asked > room:
        raise invalid(
            "stop.max_tokens",
            f"the prompt's {prompt_len} tokens and {asked} generated ones can never fit the largest runner, which "
            f"holds at most {pool_tokens} of one sequence; set it to at most {room}",
        )
    return asked


def _check_received(received: list[int], sampling: plan_pb2.Sampling, max_tokens: int) -> None:
    """Received tokens must be what a choice can have generated. A complete one may come: the engine ends it at once."""
    if len(received) > max_tokens:
        raise invalid(
            "received_token_ids", f"there are {len(received)} of them, and a choice has {max_tokens} tokens at most"
        )
    stops = set(int32_list(sampling.stop_ids))
    for index in range(sampling.min_tokens, len(received) - 1):
        if received[index] in stops:
            raise invalid(f"received_token_ids[{index}]", f"{received[index]} ends a choice, and others follow it")


def _timeout_ms(request: inference_pb2.GenerateRequest, remaining_ms: int | None) -> int | None:
    """The earlier of the request's timeout and the call's deadline."""
    limits = [request.timeout_ms] if request.HasField("timeout_ms") else []
    if remaining_ms is not None:
        limits.append(min(max(remaining_ms, 1), 2**32 - 1))
    return min(limits, default=None)
