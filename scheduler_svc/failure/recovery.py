"""Recovery after a scheduler restart: rebuilds requests, slots and block pools from a runner's snapshot.

The snapshot has each sequence's tokens, the number of computed ones, its block table, and the context set by the former
scheduler. Everything else is computed again from the prompt: the request's other choices that were waiting or had
ended, and all sequences that return log-probabilities. The results are the same, because sampling noise is keyed by
position. A request that no runner holds must be sent again by its client.

What a sequence keeps of the runner's state:

| the request                                            | slot and KV | tokens |
|--------------------------------------------------------|-------------|--------|
| returns log-probabilities, of its tokens or prompt     | no          | no     |
| has a grammar, or its tenant is at its running limit   | no          | yes    |
| is any other                                           | yes         | yes    |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.constrained.constraints import Constraints
from scheduler_svc.failure.disconnected_requests import DisconnectedRequests
from scheduler_svc.failure.probation import PROBE_ID
from scheduler_svc.model.intake import build_request
from scheduler_svc.model.refusal import EngineRefusal
from scheduler_svc.model.sequence import NOBODY, End, FinishReason, Phase, Request, Sequence
from scheduler_svc.model.sequence_ids import SequenceIds
from scheduler_svc.model.token_log import logged
from scheduler_svc.plan.applied_result import end_of
from scheduler_svc.requests.requests import Requests
from scheduler_svc.scheduler.scheduler import Scheduler


class UnsoundSnapshot(ValueError):
    """An inconsistent snapshot: the runner must start again without sequences."""


@dataclass(slots=True, frozen=True)
class Resident:
    """One decoded sequence of a snapshot."""

    slot: int
    sequence_id: int
    tokens: list[int]
    prompt_len: int
    computed: int
    blocks: list[int]
    context: engine_pb2.SequenceContext


def read_snapshot(snapshot: plan_pb2.Snapshot, hello: plan_pb2.Hello) -> list[Resident]:
    """Returns the sequences of a snapshot, each checked against the runner's limits. Raises UnsoundSnapshot."""
    residents = [_read_resident(entry, hello) for entry in snapshot.sequences]
    for name, count in Counter([entry.slot for entry in residents]).items():
        if count > 1:
            raise UnsoundSnapshot(f"slot {name} appears {count} times in the snapshot")
    return residents


def _read_resident(entry: plan_pb2.ResidentSequence, hello: plan_pb2.Hello) -> Resident:
    try:
        context = engine_pb2.SequenceContext.FromString(entry.context)
    except DecodeError as error:
        raise UnsoundSnapshot(
            f"slot {entry.slot}: its context can't be decoded, versions may differ: {error}"
        ) from error
    resident = Resident(
        entry.slot,
        entry.sequence_id,
        np.frombuffer(entry.tokens, "<i4").tolist(),
        entry.prompt_len,
        entry.computed,
        np.frombuffer(entry.blocks, "<i4").tolist(),
        context,
    )
    num_known = resident.prompt_len + context.num_received
    fits = (
        resident.slot < hello.num_slots
        and resident.prompt_len > 0
        and num_known <= len(resident.tokens)
        and resident.computed <= min(len(resident.tokens), len(resident.blocks) * hello.block_size)
        and all(1 <= block <= hello.num_blocks for block in resident.blocks)
        and context.index < context.submit.n
    )
    if not fits:
        raise UnsoundSnapshot(f"slot {entry.slot}: tokens, blocks and context are inconsistent")
    return resident


class Recovery:
    """Takes over the sequences that runners hold. One per engine."""

    def __init__(
        self,
        requests: Requests,
        constraints: Constraints,
        disconnected: DisconnectedRequests,
        ids: SequenceIds,
        wall_clock: Callable[[], float],
    ) -> None:
        """`ids` skips the ids that runners hold. `wall_clock`: seconds since 1970, comparable between machines."""
        self._requests = requests
        self._constraints = constraints
        self._disconnected = disconnected
        self._wall_clock = wall_clock
        self._ids = ids

    def adopt(self, scheduler: Scheduler, residents: list[Resident]) -> int:
        """Adds the residents to a new runner's scheduler; returns how many resume. The others' slots are released."""
        self._ids.pass_by(resident.sequence_id for resident in residents)
        scheduler.pool.restore(resident.blocks for resident in residents)
        residents = sorted(residents, key=lambda resident: (resident.context.arrival_unix_s, resident.sequence_id))
        requests: dict[int, Request] = {}
        going_on = 0
        for resident in residents:
            sequence = self._wanted(resident, requests)
            fits = sequence is not None and sequence.limit <= scheduler.most_tokens
            if (
                sequence is not None
                and fits
                and self._goes_on(sequence, resident)
                and self._may_run(sequence, requests)
            ):
                self._charge_prompt(sequence)
                scheduler.admission.resume(sequence, resident.slot, resident.blocks, resident.computed)
                going_on += 1
            else:
                scheduler.drop_slot(resident.slot, resident.blocks)
        for request in requests.values():
            if request.grammar:  # its sequences keep their tokens and are computed again, with new matchers
                self._constraints.prepare(request, self._queue_missing)
            else:
                self._queue_missing(request)
        return going_on

    def _wanted(self, resident: Resident, requests: dict[int, Request]) -> Sequence | None:
        """Returns the resident's sequence, or None if it must not resume from this snapshot or does not exist.

        `requests`: those rebuilt from this snapshot, by the id of their first sequence.
        """
        context = resident.context
        if resident.sequence_id == PROBE_ID:
            return None
        first_id = resident.sequence_id - context.index
        request = self._known(context.submit, first_id)
        if request is None:
            request = requests[first_id] = self._rebuild(resident, first_id)
            self._requests.enter(request)
            self._disconnected.detach(request)
            self._requests.shares.submitted(request)
        sequence = request.sequences[context.index] if context.index < len(request.sequences) else None
        if sequence is None or sequence.id != resident.sequence_id or sequence.phase is Phase.FINISHED:
            return None
        if sequence.scheduler is not None or sequence.stale:
            return None  # it started again on another runner, whose rows in flight bring the same tokens
        if len(sequence.tokens) > len(resident.tokens):
            return None
        if request.sampling.HasField("logprobs") or request.scores_prompt:
            return None  # no runner keeps log-probabilities: all is computed again to restore them
        if request.grammar:  # a rebuilt request keeps its tokens; others wait, or will once their grammar is compiled
            return sequence if first_id in requests else None
        if resident.computed >= len(resident.tokens) or request.suspicion.is_held:
            return None  # its last row failed, or it may crash runners: either will show again elsewhere
        return sequence

    def _known(self, submit: engine_pb2.Submit, first_id: int) -> Request | None:
        """Returns the request of this id, or None; an earlier request whose id was reused since is ended.

        A runner that was unreachable may still hold a request that its client has cancelled or sent again.
        """
        request = self._requests.book.by_key(submit.tenant, submit.request_id)
        if request is None or not request.rebuilt or request.sequences[0].id >= first_id:
            return request
        refusal = EngineRefusal(
            grpc.StatusCode.UNAVAILABLE, "a runner holds a later request with this id: attach to it"
        )
        self._requests.outbox.message(request.owner, refusal.to_message(request.handle))
        self._requests.book.abandon(request)  # its listener has received the refusal, which is final
        request.is_left = True
        self._requests.finish_request(request, End(FinishReason.CANCELLED, message=refusal.message))
        return None

    def _goes_on(self, sequence: Sequence, resident: Resident) -> bool:
        """Removes the sequence from every queue and sets it to the runner's state; returns False if that ends it.

        Tokens sampled after an end are dropped. The tenant is charged for those that are new here.
        """
        known, tokens = len(sequence.log), resident.tokens
        end = None
        for count in range(known + 1, len(tokens) + 1):
            end = end_of(sequence, tokens[count - 1], count)
            if end is not None:
                tokens = tokens[:count]
                break
        self._requests.discard_waiting(sequence)
        self._requests.outbox.more(sequence, tokens[known:])
        self._requests.ledger.restore(sequence.request.tenant, 0, len(tokens) - known)
        sequence.log, sequence.hashes = logged(tokens), []
        sequence.cached_tokens = resident.context.cached_tokens
        if end is not None:
            self._requests.finish(sequence, end)
        return end is None

    def _may_run(self, sequence: Sequence, requests: dict[int, Request]) -> bool:
        """Returns whether it may resume in its slot, given its grammar and its tenant's limit; otherwise it waits."""
        request, shares = sequence.request, self._requests.shares
        if request.grammar:
            return False
        if shares.resume(sequence):
            return True
        if requests.get(request.sequences[0].id) is not request:  # its other choices are queued already
            shares.enter(sequence, self._requests.queue)
        return False

    def _charge_prompt(self, sequence: Sequence) -> None:
        """Charges the tenant for the prompt that the former scheduler computed for a running sequence; nothing for one
        that this scheduler has admitted before."""
        if sequence.admitted:
            return
        known = sequence.prompt_len + sequence.request.num_received  # they are computed together
        self._requests.ledger.restore(sequence.request.tenant, known - sequence.cached_tokens, 0)

    def _rebuild(self, resident: Resident, first_id: int) -> Request:
        """Rebuilds the request without a client, with all its choices at their beginning."""
        context = resident.context
        now_s, unix_s = self._requests.ledger.now_s, self._wall_clock()
        known = resident.prompt_len + context.num_received
        submit = engine_pb2.Submit()
        submit.CopyFrom(context.submit)
        submit.prompt = np.array(resident.tokens[: resident.prompt_len], "<i4").tobytes()
        submit.received = np.array(resident.tokens[resident.prompt_len : known], "<i4").tobytes()
        request = build_request(submit, NOBODY, first_id, now_s - max(0.0, unix_s - context.arrival_unix_s))
        request.rebuilt = True
        request.arrival_unix_s = context.arrival_unix_s
        if context.HasField("deadline_unix_s"):
            request.deadline_s = now_s + context.deadline_unix_s - unix_s
        return request

    def _queue_missing(self, request: Request) -> None:
        """Queues the choices that no runner has reported (yet): they start again."""
        for sequence in request.sequences:
            if sequence.phase is Phase.WAITING:
                self._requests.shares.enter(sequence, self._requests.queue)
