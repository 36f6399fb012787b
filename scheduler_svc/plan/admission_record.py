"""The admission message, with which a runner receives a new sequence."""

from __future__ import annotations

from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.model.sequence import Request, Sequence
from scheduler_svc.plan.plan_draft import pack


def add_admission(plan: plan_pb2.Plan, sequence: Sequence, num_computed: int) -> None:
    """Adds a new sequence to the plan: tokens, parameters, noise key, blocks, and the context for a later snapshot."""
    request = sequence.request
    plan.admissions.add(
        slot=sequence.slot,
        sequence_id=sequence.id,
        tokens=sequence.column(0, len(sequence.tokens)),
        prompt_len=sequence.prompt_len,
        num_computed=num_computed,
        seed=request.seed,
        sample_index=sequence.index,
        sampling=_sampling(request),
        blocks=pack(sequence.blocks),
        context=context_bytes(sequence),
    )


def context_bytes(sequence: Sequence) -> bytes:
    """Returns a serialized SequenceContext: everything but the tokens that a restarted scheduler needs."""
    request = sequence.request
    context = engine_pb2.SequenceContext(
        index=sequence.index,
        num_received=request.num_received,
        arrival_unix_s=request.arrival_unix_s,
        cached_tokens=sequence.cached_tokens,
    )
    _fill(context.submit, request)
    if request.deadline_s is not None:
        context.deadline_unix_s = request.arrival_unix_s + request.deadline_s - request.arrival_s
    return context.SerializeToString()


def _sampling(request: Request) -> plan_pb2.Sampling:
    """Returns the sampling parameters for the runner. With a grammar, masks enforce `min_tokens`, because only they
    know where nothing but an end token may follow."""
    if not request.grammar or not request.sampling.min_tokens:
        return request.sampling
    sampling = plan_pb2.Sampling()
    sampling.CopyFrom(request.sampling)
    sampling.min_tokens = 0
    return sampling


def _fill(submit: engine_pb2.Submit, request: Request) -> None:
    """Fills `submit` from the request, without its tokens. Setting fields one by one costs a third of a constructor
    with keywords."""
    submit.handle = request.handle
    submit.tenant = request.tenant
    submit.request_id = request.request_id
    submit.digest = request.digest
    if request.body:
        submit.body = request.body
    submit.sampling.CopyFrom(request.sampling)
    submit.n = len(request.sequences)
    submit.seed = request.seed
    submit.max_tokens = request.max_tokens
    if request.priority:
        submit.priority = request.priority
    if request.cache_salt:
        submit.cache_salt = request.cache_salt
    if request.conversation_id:
        submit.conversation_id = request.conversation_id
    if request.kv_retain_s is not None:
        submit.kv_retain_s = request.kv_retain_s
    if request.next_turn_s is not None:
        submit.next_turn_s = request.next_turn_s
    if request.ttft_target_ms is not None:
        submit.ttft_target_ms = request.ttft_target_ms
    if request.itl_target_ms is not None:
        submit.itl_target_ms = request.itl_target_ms
    if request.keep_s:
        submit.keep_ms = round(request.keep_s * 1000)
    if request.grammar:
        submit.grammar = request.grammar
    if request.open_ended:
        submit.open_ended = True
    if not request.speculates:
        submit.no_speculation = True
