"""Messages for the front workers: collected during a step, sent after the plans, since publishing is expensive."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from roster_protos import engine_pb2
from scheduler_svc.link.links import Fronts
from scheduler_svc.model.prompt_logprobs import joined
from scheduler_svc.model.sequence import NOBODY, Sequence
from scheduler_svc.plan.applied_result import AppliedResult
from scheduler_svc.plan.plan_draft import pack


class Outbox:
    """Messages per worker in order of occurrence; the tokens of one result are sent as columns."""

    def __init__(self) -> None:
        self._messages: dict[bytes, list[engine_pb2.FromEngine]] = defaultdict(list)

    def message(self, worker: bytes, message: engine_pb2.FromEngine) -> None:
        """Adds a message for the worker; dropped for `NOBODY`."""
        if worker != NOBODY:
            self._messages[worker].append(message)

    def tokens(self, applied: AppliedResult, sole_owner: bytes | None) -> None:
        """Adds the tokens of a result. `sole_owner`: the worker that owns every live request, if exactly one does."""
        if sole_owner is not None and not applied.logprobs and not applied.prompt_logprobs:  # almost always
            message = engine_pb2.FromEngine()
            step = message.step
            step.sequence_ids, step.tokens = applied.sequence_ids.tobytes(), applied.tokens.tobytes()
            self.message(sole_owner, message)
            return
        for worker, step in _steps(applied, sole_owner).items():
            self.message(worker, engine_pb2.FromEngine(step=step))

    def more(self, sequence: Sequence, tokens: list[int]) -> None:
        """Adds tokens of a sequence that come from no result."""
        if tokens:
            ids = np.full(len(tokens), sequence.id, "<u8").tobytes()
            step = engine_pb2.Step(sequence_ids=ids, tokens=pack(tokens))
            self.message(sequence.request.owner, engine_pb2.FromEngine(step=step))

    def end(self, sequence: Sequence) -> None:
        """Adds the end of the sequence, after its last tokens."""
        if sequence.request.owner == NOBODY:
            return
        messages = self._messages[sequence.request.owner]
        if not messages or not messages[-1].HasField("step"):
            messages.append(engine_pb2.FromEngine(step=engine_pb2.Step()))
        messages[-1].step.ends.append(end_message(sequence))

    def flush(self, fronts: Fronts) -> list[bytes]:
        """Sends all messages; returns the workers that are gone."""
        gone = []
        for worker, messages in self._messages.items():
            for message in messages:
                if not fronts.send(worker, message):
                    gone.append(worker)
                    break
        self._messages.clear()
        return gone


def _steps(applied: AppliedResult, sole_owner: bytes | None) -> dict[bytes, engine_pb2.Step]:
    """Returns the columns of a result, split by the workers that own the sequences."""
    if sole_owner is not None:
        return {sole_owner: _step(applied, applied.sequence_ids.tobytes(), applied.tokens.tobytes(), None)}
    sequences = applied.sequences
    owners = {sequence.request.owner for sequence in sequences}
    owners.update(sequence.request.owner for sequence, _ in applied.prompt_logprobs)
    steps = {}
    for owner in owners:
        mine = np.array([sequence.request.owner == owner for sequence in sequences], bool)
        steps[owner] = _step(applied, applied.sequence_ids[mine].tobytes(), applied.tokens[mine].tobytes(), owner)
    return steps


def _step(applied: AppliedResult, sequence_ids: bytes, tokens: bytes, owner: bytes | None) -> engine_pb2.Step:
    step = engine_pb2.Step(sequence_ids=sequence_ids, tokens=tokens)
    if applied.logprobs:
        rank_of_index: dict[int, int] = {}
        for index, sequence in enumerate(applied.sequences):
            if owner is None or sequence.request.owner == owner:
                rank_of_index[index] = len(rank_of_index)
        for index, logprobs in applied.logprobs:
            if index in rank_of_index:
                step.logprobs.add().CopyFrom(logprobs)
                step.logprobs[-1].row = rank_of_index[index]
    mine = [(s, p) for s, p in applied.prompt_logprobs if owner is None or s.request.owner == owner]
    if not mine:
        return step
    for row, (_, logprobs) in enumerate(mine):
        step.prompt_logprobs.add().CopyFrom(logprobs)
        step.prompt_logprobs[-1].row = row
    step.prompt_sequence_ids = np.array([s.id for s, _ in mine], "<u8").tobytes()
    return step


def end_message(sequence: Sequence) -> engine_pb2.End:
    """Returns the message for the sequence's end. Raises ValueError if it has not ended."""
    end = sequence.end
    if end is None:
        raise ValueError(f"sequence {sequence.id} has not ended")
    return engine_pb2.End(
        sequence_id=sequence.id,
        reason=int(end.reason),
        stop_token_id=end.stop_token_id,
        stop_string=end.stop_string,
        message=end.message,
        num_tokens=sequence.num_generated,
        cached_tokens=sequence.cached_tokens,
        queue_s=sequence.queue_s,
        drafted_tokens=sequence.drafted_tokens,
        accepted_tokens=min(sequence.accepted_tokens, sequence.num_generated),  # a stop string may have cut some
    )


def attached_message(handle: int, sequences: list[Sequence]) -> engine_pb2.FromEngine:
    """Returns the complete state of a request, for the worker that takes it over."""
    request = sequences[0].request
    attached = engine_pb2.Attached(
        handle=handle,
        body=request.body,
        prompt=request.prompt,
        num_received=request.num_received,
        cached_tokens=sequences[0].cached_tokens,
    )
    for sequence in sequences:
        record = attached.choices.add(
            sequence_id=sequence.id, tokens=sequence.column(request.prompt_len, len(sequence.tokens))
        )
        if sequence.logprobs:
            record.logprobs.CopyFrom(joined(sequence.logprobs))
        if sequence.end is not None:
            record.end.CopyFrom(end_message(sequence))
    known = request.prompt_logprobs.joined() if request.prompt_logprobs is not None else None
    if known is not None:
        attached.prompt_logprobs.CopyFrom(known)
    return engine_pb2.FromEngine(attached=attached)
