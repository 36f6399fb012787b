"""A stand-in for the engine in front-end tests: a ROUTER socket in a thread that speaks protos/engine.proto.

A request's answer is its prompt, repeated, one token a step, so that a test knows every token and character. The
log-probability of token t is -t/256; its alternatives are the tokens after it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import zmq

from roster_protos import admin_pb2, engine_pb2, inference_pb2, plan_pb2


def packed_logprobs(tokens: list[int], top: int, row: int = 0, first_position: int = 0) -> plan_pb2.RowLogprobs:
    """Returns the fake engine's log-probabilities of consecutive tokens."""
    ids = [(token + 1 + rank) % 256 for token in tokens for rank in range(top)]
    return plan_pb2.RowLogprobs(
        row=row,
        first_position=first_position,
        values=(-np.array(tokens, "<f4") / 256).astype("<f4").tobytes(),
        top=top,
        top_ids=np.array(ids, "<i4").tobytes(),
        top_values=(-np.array(ids, "<f4") / 256).astype("<f4").tobytes(),
    )


def _empty_cache(ask: engine_pb2.KvSubscribe) -> engine_pb2.KvSubscribed:
    return engine_pb2.KvSubscribed(number=100, snapshot=engine_pb2.KvSnapshot())


@dataclass(eq=False)
class FakeSequence:
    """One choice of a request, with the tokens sent so far."""

    id: int
    request: FakeRequest
    tokens: list[int] = field(default_factory=list)
    end: engine_pb2.End | None = None


@dataclass(eq=False)
class FakeRequest:
    """A request as submitted, with its present owner."""

    submit: engine_pb2.Submit
    owner: bytes
    handle: int
    prompt: list[int]
    expires: float | None
    sequences: list[FakeSequence] = field(default_factory=list)


class FakeEngine:
    """Runs until `stop`. Attributes may be read and set from the test's thread while it runs."""

    def __init__(self, endpoint: str, model: plan_pb2.Model, step_s: float = 0.002) -> None:
        """`step_s`: seconds between steps."""
        self.endpoint = endpoint
        self.step_s = step_s
        self.state = engine_pb2.ModelState(model=model, ready=True, pool_tokens=1 << 20)
        self.refuse: Callable[[engine_pb2.Submit], engine_pb2.Refused | None] = lambda submit: None
        self.stepping = threading.Event()
        self.stepping.set()
        self.answers_pings = True
        self.runners_progress = True
        self.commands: list[engine_pb2.Command] = []
        self.requests: dict[tuple[str, str], FakeRequest] = {}
        self.forgotten: list[tuple[str, str]] = []
        self.steps = 0
        self.kv_start: Callable[[engine_pb2.KvSubscribe], engine_pb2.KvSubscribed | engine_pb2.Refused] = _empty_cache
        self.kv_news: deque[engine_pb2.KvChanges] = deque()
        """Changes put here are sent to all followers at once."""
        self._announced = self.state
        self._workers: set[bytes] = set()
        self._watchers: set[bytes] = set()
        self._kv_followers: dict[int, bytes] = {}
        self._sequences: dict[int, FakeSequence] = {}
        self._next_id = 1
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> FakeEngine:
        """Binds the socket and starts the thread."""
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.endpoint)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stops the thread and waits for its end."""
        self._stopped.set()
        self._thread.join()

    def commands_of(self, kind: str) -> list[engine_pb2.Command]:
        """Returns the commands of one kind received so far."""
        return [command for command in self.commands if command.WhichOneof("command") == kind]

    def _run(self) -> None:
        next_step = time.monotonic()
        while not self._stopped.is_set():
            wait = max(0.0, next_step - time.monotonic())
            if self._socket.poll(wait * 1000):
                worker, frame = self._socket.recv_multipart()
                for command in engine_pb2.ToEngine.FromString(frame).commands:
                    self.commands.append(command)
                    kind = command.WhichOneof("command")
                    getattr(self, f"_on_{kind}")(worker, getattr(command, kind))
            if self.state is not self._announced:
                self._announced = self.state
                for worker in self._workers:
                    self._send(worker, model=self._announced)
            while self.kv_news:
                changes = self.kv_news.popleft()
                for follower in set(self._kv_followers.values()):
                    self._send(follower, kv_changes=changes)
            if time.monotonic() >= next_step:
                next_step += self.step_s
                if self.stepping.is_set():
                    self._step()
        self._socket.close()

    def _send(self, worker: bytes, **message: object) -> None:
        self._socket.send_multipart([worker, engine_pb2.FromEngine(**message).SerializeToString()])

    def _step(self) -> None:
        """Gives each running sequence its next token."""
        self.steps += 1
        ids: dict[bytes, list[int]] = defaultdict(list)
        tokens: dict[bytes, list[int]] = defaultdict(list)
        steps: dict[bytes, engine_pb2.Step] = defaultdict(engine_pb2.Step)
        for sequence in list(self._sequences.values()):
            request, submit = sequence.request, sequence.request.submit
            step = steps[request.owner]
            if request.expires is not None and time.monotonic() > request.expires:
                step.ends.append(self._end(sequence, inference_pb2.FINISH_REASON_DEADLINE))
                continue
            if submit.sampling.HasField("prompt_logprobs") and not sequence.tokens:
                self._add_prompt_logprobs(step, sequence)
            token = request.prompt[len(sequence.tokens) % len(request.prompt)]
            sequence.tokens.append(token)
            if submit.sampling.HasField("logprobs"):
                top = submit.sampling.logprobs
                step.logprobs.append(packed_logprobs([token], top, row=len(ids[request.owner])))
            ids[request.owner].append(sequence.id)
            tokens[request.owner].append(token)
            if len(sequence.tokens) == submit.max_tokens:
                step.ends.append(self._end(sequence, inference_pb2.FINISH_REASON_LENGTH))
        for worker, step in steps.items():
            step.sequence_ids = np.array(ids[worker], "<u8").tobytes()
            step.tokens = np.array(tokens[worker], "<i4").tobytes()
            self._send(worker, step=step)
        for worker in self._watchers:
            self._send(worker, step_report=admin_pb2.WatchStepsResponse(number=self.steps))

    def _add_prompt_logprobs(self, step: engine_pb2.Step, sequence: FakeSequence) -> None:
        """Adds the prompt's log-probabilities in two overlapping parts, as after a preemption."""
        prompt, top = sequence.request.prompt, sequence.request.submit.sampling.prompt_logprobs
        half = len(prompt) // 2
        for first, tokens in ((1, prompt[1 : half + 1]), (half, prompt[half:])):
            row = len(step.prompt_logprobs)
            step.prompt_logprobs.append(packed_logprobs(tokens, top, row, first_position=first))
            step.prompt_sequence_ids += np.array([sequence.id], "<u8").tobytes()

    def _end(self, sequence: FakeSequence, reason: int, stop_string: str = "") -> engine_pb2.End:
        self._sequences.pop(sequence.id, None)
        sequence.end = engine_pb2.End(
            sequence_id=sequence.id,
            reason=reason,
            stop_string=stop_string,
            num_tokens=len(sequence.tokens),
            cached_tokens=3,
            queue_s=0.0,
            drafted_tokens=4,
            accepted_tokens=2,
        )
        return sequence.end

    def _on_hello(self, worker: bytes, hello: engine_pb2.WorkerHello) -> None:
        self._workers.add(worker)
        self._send(worker, model=self._announced)

    def _on_submit(self, worker: bytes, submit: engine_pb2.Submit) -> None:
        known = self.requests.get((submit.tenant, submit.request_id))
        if known is not None and known.submit.digest == submit.digest:
            self._hand_over(known, worker, submit.handle)
            return
        refused = self.refuse(submit)
        if known is not None:
            refused = engine_pb2.Refused(code=6, message="another body", field="request_id")
        if refused is not None:
            refused.handle = submit.handle
            self._send(worker, refused=refused)
            return
        expires = time.monotonic() + submit.timeout_ms / 1000 if submit.HasField("timeout_ms") else None
        prompt = np.frombuffer(submit.prompt, "<i4").tolist()
        request = FakeRequest(submit, worker, submit.handle, prompt, expires)
        self.requests[submit.tenant, submit.request_id] = request
        received = np.frombuffer(submit.received, "<i4").tolist()
        for _ in range(submit.n):
            sequence = FakeSequence(self._next_id, request, list(received))
            request.sequences.append(sequence)
            self._sequences[sequence.id] = sequence
            self._next_id += 1
        first = request.sequences[0].id
        self._send(worker, accepted=engine_pb2.Accepted(handle=submit.handle, first_sequence_id=first, seed=1))

    def _on_cut(self, worker: bytes, cut: engine_pb2.Cut) -> None:
        sequence = self._sequences.get(cut.sequence_id)
        if sequence is not None:
            del sequence.tokens[cut.num_tokens :]
            end = self._end(sequence, inference_pb2.FINISH_REASON_STOP, cut.stop_string)
            self._send(sequence.request.owner, step=engine_pb2.Step(ends=[end]))

    def _cancel(self, request: FakeRequest) -> None:
        running = [sequence for sequence in request.sequences if sequence.end is None]
        ends = [self._end(sequence, inference_pb2.FINISH_REASON_CANCELLED) for sequence in running]
        self._send(request.owner, step=engine_pb2.Step(ends=ends))

    def _by_handle(self, handle: int) -> FakeRequest | None:
        return next((request for request in self.requests.values() if request.handle == handle), None)

    def _on_cancel(self, worker: bytes, cancel: engine_pb2.Cancel) -> None:
        request = self._by_handle(cancel.handle)
        if request is not None:
            self._cancel(request)

    def _on_disconnect(self, worker: bytes, disconnect: engine_pb2.Disconnect) -> None:
        request = self._by_handle(disconnect.handle)
        if request is not None and request.submit.keep_ms == 0:
            self._cancel(request)

    def _on_cancel_by_id(self, worker: bytes, cancel: engine_pb2.CancelById) -> None:
        request = self.requests.get((cancel.tenant, cancel.request_id))
        if request is None:
            self._send(worker, refused=engine_pb2.Refused(handle=cancel.handle, code=5, message="unknown"))
        else:
            self._cancel(request)
            self._send(worker, done=engine_pb2.Done(handle=cancel.handle))

    def _on_forget(self, worker: bytes, forget: engine_pb2.Forget) -> None:
        self.forgotten.append((forget.tenant, forget.conversation_id))
        self._send(worker, forgotten=engine_pb2.Forgotten(handle=forget.handle, tokens=32))

    def _on_attach(self, worker: bytes, attach: engine_pb2.Attach) -> None:
        request = self.requests.get((attach.tenant, attach.request_id))
        if request is None:
            self._send(worker, refused=engine_pb2.Refused(handle=attach.handle, code=5, message="unknown"))
        else:
            self._hand_over(request, worker, attach.handle)

    def _hand_over(self, request: FakeRequest, worker: bytes, handle: int) -> None:
        self._send(request.owner, detached=engine_pb2.Detached(handle=request.handle))
        request.owner, request.handle = worker, handle
        submit = request.submit
        num_received = len(submit.received) // 4
        attached = engine_pb2.Attached(
            handle=handle, body=submit.body, prompt=submit.prompt, num_received=num_received, cached_tokens=3
        )
        for sequence in request.sequences:
            tokens = np.array(sequence.tokens, "<i4").tobytes()
            record = attached.choices.add(sequence_id=sequence.id, tokens=tokens)
            if submit.sampling.HasField("logprobs"):
                top = submit.sampling.logprobs
                record.logprobs.CopyFrom(packed_logprobs(sequence.tokens[num_received:], top))
            if sequence.end is not None:
                record.end.CopyFrom(sequence.end)
        self._send(worker, attached=attached)

    def _on_kv_subscribe(self, worker: bytes, ask: engine_pb2.KvSubscribe) -> None:
        answer = self.kv_start(ask)
        answer.handle = ask.handle
        if isinstance(answer, engine_pb2.Refused):
            self._send(worker, refused=answer)
        else:
            self._kv_followers[ask.handle] = worker
            self._send(worker, kv_subscribed=answer)

    def _on_kv_unsubscribe(self, worker: bytes, over: engine_pb2.KvUnsubscribe) -> None:
        self._kv_followers.pop(over.handle, None)

    def _on_status_query(self, worker: bytes, query: engine_pb2.StatusQuery) -> None:
        status = admin_pb2.GetStatusResponse(version="fake", waiting=7)
        self._send(worker, status_reply=engine_pb2.StatusReply(handle=query.handle, status=status))

    def _on_flush_prefixes(self, worker: bytes, flush: engine_pb2.FlushPrefixes) -> None:
        self._send(worker, done=engine_pb2.Done(handle=flush.handle))

    def _on_ping(self, worker: bytes, ping: engine_pb2.Ping) -> None:
        if self.answers_pings:
            self._send(worker, pong=engine_pb2.Pong(runners_progress=self.runners_progress))

    def _on_watch(self, worker: bytes, watch: engine_pb2.Watch) -> None:
        (self._watchers.add if watch.on else self._watchers.discard)(worker)
