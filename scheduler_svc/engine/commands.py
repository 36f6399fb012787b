"""Commands of front workers, one method each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from roster_protos import engine_pb2
from scheduler_svc.constrained.constraints import Constraints
from scheduler_svc.engine.admission_control import AdmissionControl
from scheduler_svc.engine.front_workers import FrontWorkers
from scheduler_svc.engine.policy_commands import PolicyCommands
from scheduler_svc.engine.shutdown import Shutdown
from scheduler_svc.failure.disconnected_requests import DisconnectedRequests
from scheduler_svc.failure.runner_lifecycle import RunnerLifecycle
from scheduler_svc.kv_events.kv_feed import KvFeed
from scheduler_svc.model.intake import build_request
from scheduler_svc.model.refusal import EngineRefusal
from scheduler_svc.model.sequence import End, FinishReason, Request
from scheduler_svc.model.sequence_ids import SequenceIds
from scheduler_svc.moves.moves import Moves
from scheduler_svc.reports.reports import Reports
from scheduler_svc.reports.watchers import Watchers
from scheduler_svc.requests.outbox import attached_message
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.runner_pool import RunnerPool


class Commands:
    """Executes commands. A command that can't be executed is answered with a refusal; nothing is raised."""

    def __init__(
        self,
        requests: Requests,
        pool: RunnerPool,
        admission_control: AdmissionControl,
        policies: PolicyCommands,
        constraints: Constraints,
        disconnected: DisconnectedRequests,
        lifecycle: RunnerLifecycle,
        ids: SequenceIds,
        workers: FrontWorkers,
        watchers: Watchers,
        kv_feed: KvFeed,
        reports: Reports,
        shutdown: Shutdown,
        moves: Moves,
    ) -> None:
        self._requests = requests
        self._pool = pool
        self.admission_control = admission_control
        self.policies = policies
        self._constraints = constraints
        self._disconnected = disconnected
        self._lifecycle = lifecycle
        self._ids = ids
        self._workers = workers
        self._watchers = watchers
        self._kv_feed = kv_feed
        self._reports = reports
        self._shutdown = shutdown
        self._moves = moves
        self._table = self._handlers()

    def _handlers(self) -> dict[str, Callable[[bytes, Any], None]]:
        """Returns what executes each kind of command."""
        return {
            "hello": self._hello,
            "submit": self._submit,
            "cut": self._cut,
            "cancel": self._cancel,
            "cancel_by_id": self._cancel_by_id,
            "attach": self._attach,
            "disconnect": self._disconnect,
            "status_query": self._status_query,
            "watch": self._watch,
            "roster_query": self._roster_query,
            "drain": self._drain,
            "ping": self._ping,
            "flush_prefixes": self._flush_prefixes,
            "forget": self._forget,
            "kv_subscribe": self._kv_feed.subscribe,
            "kv_unsubscribe": self._kv_unsubscribe,
            "policies_query": self.policies.list,
            "policy_change": self.policies.change,
        }

    def execute(self, worker: bytes, command: engine_pb2.Command) -> None:
        """Executes one command of the worker."""
        kind = command.WhichOneof("command")
        if kind is not None:
            self._table[kind](worker, getattr(command, kind))

    def _hello(self, worker: bytes, hello: engine_pb2.WorkerHello) -> None:
        self._workers.add(hello.worker, worker)

    def _submit(self, worker: bytes, submit: engine_pb2.Submit) -> None:
        known = self._requests.book.by_key(submit.tenant, submit.request_id)
        if known is not None and known.cancelled:  # the id of a cancelled request may be reused
            self._requests.book.forget(known)
            known = None
        if known is not None and known.digest == submit.digest:
            self._hand_over(known, submit.handle, worker)
            return
        request = build_request(submit, worker, self._ids.next(submit.n), self._requests.ledger.now_s)
        refusal = self.admission_control.refusal(request, known)
        if refusal is not None:
            self._requests.totals.refuse(refusal.reason)
            self._requests.outbox.message(worker, refusal.to_message(submit.handle))
            request.drop_sequences()
            return
        self._requests.submit(request)
        if request.grammar:
            self._constraints.prepare(request, self._requests.begin)
        else:
            self._requests.begin(request)

    def _cut(self, worker: bytes, cut: engine_pb2.Cut) -> None:
        """Ends the sequence at a stop string that the text stream found, and removes the tokens sampled beyond it, for
        which the tenant is not charged.

        This also applies to a sequence that has already ended with STOP or LENGTH.
        """
        sequence = self._requests.book.sequence(cut.sequence_id)
        if sequence is None or sequence.num_generated < cut.num_tokens:
            return
        if sequence.end is not None and sequence.end.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        end = End(FinishReason.STOP, stop_string=cut.stop_string)
        # None if an earlier cut left fewer tokens than the client had received.
        sampled_behind = max(0, sequence.num_generated - max(cut.num_tokens, sequence.request.num_received))
        self._requests.ledger.take_back(sequence.request.tenant, sampled_behind)
        del sequence.tokens[sequence.prompt_len + cut.num_tokens :]
        del sequence.logprobs[max(0, cut.num_tokens - sequence.request.num_received) :]
        if sequence.end is None:
            self._requests.finish(sequence, end)
        sequence.end = end

    def _cancel(self, worker: bytes, cancel: engine_pb2.Cancel) -> None:
        request = self._requests.book.by_handle(cancel.handle)
        if request is not None:
            self._requests.finish_request(request, End(FinishReason.CANCELLED))

    def _cancel_by_id(self, worker: bytes, cancel: engine_pb2.CancelById) -> None:
        request = self._requests.book.by_key(cancel.tenant, cancel.request_id)
        if request is None:
            self._requests.outbox.message(worker, _unknown(cancel.request_id).to_message(cancel.handle))
            return
        self._requests.finish_request(request, End(FinishReason.CANCELLED))
        self._requests.outbox.message(worker, engine_pb2.FromEngine(done=engine_pb2.Done(handle=cancel.handle)))

    def _attach(self, worker: bytes, attach: engine_pb2.Attach) -> None:
        request = self._requests.book.by_key(attach.tenant, attach.request_id)
        if request is None:
            refusal = _not_yet() if self._lifecycle.recovering else _unknown(attach.request_id)
            self._requests.outbox.message(worker, refusal.to_message(attach.handle))
            return
        self._hand_over(request, attach.handle, worker)

    def _hand_over(self, request: Request, handle: int, worker: bytes) -> None:
        """Moves the request to another stream, of any worker, and sends it the tokens so far.

        A request that ended with a status is answered with that status.
        """
        outbox = self._requests.outbox
        if request.refusal is not None:
            outbox.message(worker, request.refusal.to_message(handle))
            return
        detached = engine_pb2.Detached(handle=request.handle)
        outbox.message(request.owner, engine_pb2.FromEngine(detached=detached))
        self._requests.book.rename(request, handle, worker)
        self._requests.note_accepted(request)
        outbox.message(worker, attached_message(handle, request.sequences))

    def _disconnect(self, worker: bytes, disconnect: engine_pb2.Disconnect) -> None:
        request = self._requests.book.by_handle(disconnect.handle)
        if request is not None:
            self._disconnected.disconnect(request)

    def _status_query(self, worker: bytes, query: engine_pb2.StatusQuery) -> None:
        reply = engine_pb2.StatusReply(handle=query.handle, status=self._reports.status())
        self._requests.outbox.message(worker, engine_pb2.FromEngine(status_reply=reply))

    def _flush_prefixes(self, worker: bytes, flush: engine_pb2.FlushPrefixes) -> None:
        self._pool.flushes.flushed()
        for session, scheduler in self._pool.schedulers.items():
            scheduler.prefix.flush(scheduler.table)
            self._pool.wake(session)  # its next plan purges its host pool
        self._moves.flush()
        self._requests.outbox.message(worker, engine_pb2.FromEngine(done=engine_pb2.Done(handle=flush.handle)))

    def _forget(self, worker: bytes, forget: engine_pb2.Forget) -> None:
        tokens = 0
        for session, scheduler in self._pool.schedulers.items():
            tokens += scheduler.retention.forget(forget.tenant, forget.conversation_id)
            self._pool.wake(session)  # its next plan purges its host pool
        forgotten = engine_pb2.Forgotten(handle=forget.handle, tokens=tokens)
        self._requests.outbox.message(worker, engine_pb2.FromEngine(forgotten=forgotten))

    def _kv_unsubscribe(self, worker: bytes, over: engine_pb2.KvUnsubscribe) -> None:
        self._kv_feed.unsubscribe(worker, over.handle)

    def _watch(self, worker: bytes, watch: engine_pb2.Watch) -> None:
        if watch.on:
            self._watchers.of_steps.add(worker)
        else:
            self._watchers.of_steps.discard(worker)

    def _roster_query(self, worker: bytes, query: engine_pb2.RosterQuery) -> None:
        self._watchers.roster_queries.append((worker, query.handle))

    def _drain(self, worker: bytes, drain: engine_pb2.Drain) -> None:
        self._shutdown.begin(drain.timeout_ms / 1000 if drain.HasField("timeout_ms") else None)
        progress = engine_pb2.DrainProgress(handle=drain.handle, progress=self._reports.drain_progress())
        self._requests.outbox.message(worker, engine_pb2.FromEngine(drain_progress=progress))

    def _ping(self, worker: bytes, ping: engine_pb2.Ping) -> None:
        pong = engine_pb2.Pong(runners_progress=self._pool.progress(self._requests.ledger.now_s))
        self._requests.outbox.message(worker, engine_pb2.FromEngine(pong=pong))


def _not_yet() -> EngineRefusal:
    message = "the scheduler has just started and is recovering the requests of its runners: try again"
    return EngineRefusal(grpc.StatusCode.UNAVAILABLE, message, "", 0.2)


def _unknown(request_id: str) -> EngineRefusal:
    message = f"unknown request {request_id!r}: it never existed, its client left it, or its retention time is over"
    return EngineRefusal(grpc.StatusCode.NOT_FOUND, message, "request_id")
