"""A worker's connection to the engine: a ZeroMQ DEALER on the event loop, without `zmq.asyncio`'s future per message.

The loop watches the socket's descriptor and drains the socket without blocking. ZeroMQ's descriptor is edge-triggered,
and a send may consume an edge, so each send is followed by a drain. Commands of one loop tick are sent as one frame.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from itertools import count

import structlog
import zmq

from roster_protos import admin_pb2, engine_pb2
from scheduler_svc.front.base.little_endian import int32_list, uint64_list
from scheduler_svc.front.base.refusal import Refusal
from scheduler_svc.front.base.service_refusals import engine_lost
from scheduler_svc.front.stream.choice_stream import ChoiceStream
from scheduler_svc.front.stream.request_stream import RequestStream

log = structlog.get_logger(__name__)

ANSWERS = frozenset(
    (
        "done",
        "forgotten",
        "status_reply",
        "policies_reply",
        "policy_changed",
        "drain_progress",
        "roster_reply",
        "kv_subscribed",
    )
)
"""Messages that answer an `EngineClient.call`."""

FRAMES_PER_DRAIN = 64
"""Frames handled before other callbacks of the loop get a turn."""


class EngineClient:
    """Sends commands and passes each message of the engine to its stream or call."""

    def __init__(
        self,
        endpoint: str,
        worker: int,
        on_model: Callable[[engine_pb2.ModelState], None],
    ) -> None:
        """`endpoint`: ZeroMQ address of the engine. `worker`: index of this worker. `open` connects."""
        self._endpoint = endpoint
        self._worker = worker
        self._on_model = on_model
        self.on_step_report: Callable[[admin_pb2.WatchStepsResponse], None] | None = None
        """Called with each watched step when it is sent."""
        self.on_step_done: Callable[[engine_pb2.StepDone], None] | None = None
        """Called with the times of each watched step when its result has arrived."""
        self.on_pong: Callable[[engine_pb2.Pong], None] | None = None
        """Called with each answer to a ping."""
        self.on_drained: Callable[[engine_pb2.Drained], None] | None = None
        """Called with the engine's last message."""
        self.on_kv_changes: Callable[[engine_pb2.KvChanges], None] | None = None
        """Called with changes of the prefix cache while this worker has a subscription."""
        self._handles = count(secrets.randbits(62))
        self._requests: dict[int, RequestStream] = {}
        self._choices: dict[int, ChoiceStream] = {}
        self._incoming: dict[int, list[int]] = {}
        self._calls: dict[int, asyncio.Future[engine_pb2.FromEngine]] = {}
        self._outbox = engine_pb2.ToEngine()
        self._tick_scheduled = False
        self._lost = False

    def open(self) -> None:
        """Connects and sends WorkerHello. Must run in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.ROUTING_ID, b"front-" + secrets.token_bytes(12))
        self._socket.connect(self._endpoint)
        self._loop.add_reader(self._socket.FD, self._drain)
        self.send(engine_pb2.Command(hello=engine_pb2.WorkerHello(worker=self._worker)))

    def close(self) -> None:
        """Sends the rest of the outbox, unregisters from the loop and closes the socket."""
        self._loop.remove_reader(self._socket.FD)
        if not self._lost:
            self._send_outbox()
        self._socket.close(linger=200)

    def lose(self) -> None:
        """Ends every stream and call, current and later ones, with UNAVAILABLE, as the engine is gone."""
        self._lost = True
        for stream in list(self._requests.values()):
            stream.fail(engine_lost())
        for call in self._calls.values():
            if not call.done():
                call.set_exception(engine_lost())
        self._requests.clear()
        self._choices.clear()
        self._incoming.clear()
        self._calls.clear()

    @property
    def num_requests(self) -> int:
        """Number of requests that this worker follows."""
        return len(self._requests)

    def new_handle(self) -> int:
        """Returns a number unique among requests and calls of all workers: consecutive from a random 62-bit start."""
        return next(self._handles)

    def send(self, command: engine_pb2.Command) -> None:
        """Queues a command for the frame of the current loop tick."""
        self._outbox.commands.append(command)
        if not self._tick_scheduled:
            self._tick_scheduled = True
            self._loop.call_soon(self._tick)

    def follow(self, stream: RequestStream) -> None:
        """Passes the messages of its handle to `stream`. Raises Refusal (UNAVAILABLE) if the engine is gone."""
        if self._lost:
            raise engine_lost()
        self._requests[stream.handle] = stream

    def follow_choices(self, choices: list[ChoiceStream]) -> None:
        """Passes the tokens of the choices' sequences to them."""
        for choice in choices:
            self._choices[choice.sequence_id] = choice
            self._incoming[choice.sequence_id] = choice.incoming

    def forget(self, stream: RequestStream) -> None:
        """Drops later messages for `stream`. Can be repeated."""
        self._requests.pop(stream.handle, None)
        for choice in stream.choices:
            if self._choices.get(choice.sequence_id) is choice:
                del self._choices[choice.sequence_id]
                del self._incoming[choice.sequence_id]

    async def call(self, handle: int, command: engine_pb2.Command) -> engine_pb2.FromEngine:
        """Sends `command`, which carries `handle`, and returns the answer. Raises Refusal if it is refused."""
        if self._lost:
            raise engine_lost()
        answer: asyncio.Future[engine_pb2.FromEngine] = self._loop.create_future()
        self._calls[handle] = answer
        self.send(command)
        try:
            return await answer
        finally:
            self._calls.pop(handle, None)

    def _tick(self) -> None:
        self._tick_scheduled = False
        self._send_outbox()
        self._drain()

    def _send_outbox(self) -> None:
        if self._outbox.commands:
            frame = self._outbox.SerializeToString()
            self._outbox = engine_pb2.ToEngine()
            self._socket.send(frame, zmq.NOBLOCK)

    def _drain(self) -> None:
        for _ in range(FRAMES_PER_DRAIN):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._dispatch(engine_pb2.FromEngine.FromString(frame))
            except Exception:
                log.exception("a message of the engine could not be handled")
        self._loop.call_soon(self._drain)

    def _dispatch(self, message: engine_pb2.FromEngine) -> None:
        kind = message.WhichOneof("message")
        if kind == "step":
            self._step(message.step)
        elif kind == "model":
            self._on_model(message.model)
        elif kind == "step_report":
            if self.on_step_report is not None:
                self.on_step_report(message.step_report)
        elif kind == "step_done":
            if self.on_step_done is not None:
                self.on_step_done(message.step_done)
        elif kind == "pong":
            if self.on_pong is not None:
                self.on_pong(message.pong)
        elif kind == "kv_changes":
            if self.on_kv_changes is not None:
                self.on_kv_changes(message.kv_changes)
        elif kind == "drained":
            if self.on_drained is not None:
                self.on_drained(message.drained)
        elif kind in ANSWERS:
            self._answer(getattr(message, kind).handle, message)
        elif kind == "refused":
            self._refused(message.refused)
        elif kind in ("accepted", "attached", "detached"):
            body = getattr(message, kind)
            stream = self._requests.get(body.handle)
            if stream is not None:
                getattr(stream, kind)(body)
        else:
            log.warning("unknown message of the engine", kind=kind)

    def _answer(self, handle: int, message: engine_pb2.FromEngine) -> None:
        call = self._calls.get(handle)
        if call is not None and not call.done():
            call.set_result(message)

    def _refused(self, message: engine_pb2.Refused) -> None:
        call = self._calls.get(message.handle)
        if call is not None:
            if not call.done():
                call.set_exception(Refusal.from_engine(message))
            return
        stream = self._requests.get(message.handle)
        if stream is not None:
            self.forget(stream)
            stream.fail(Refusal.from_engine(message))

    def _step(self, step: engine_pb2.Step) -> None:
        """Passes each token to its choice. This is the path of every token: most are appended to a list that is not
        empty, which accesses nothing else of their choice."""
        choices, lists = self._choices, self._incoming
        sequence_ids = uint64_list(step.sequence_ids)
        touched = []
        for sequence_id, token in zip(sequence_ids, int32_list(step.tokens), strict=True):
            incoming = lists.get(sequence_id)
            if incoming:
                incoming.append(token)
            elif incoming is not None:
                incoming.append(token)
                touched.append(sequence_id)
        for row in step.logprobs:
            choice = choices.get(sequence_ids[row.row])
            if choice is not None and choice.logprobs is not None:
                choice.logprobs.extend(row)
        if step.prompt_logprobs:
            self._prompt_logprobs(step)
        for sequence_id in touched:
            choices[sequence_id].arrived()
        for end in step.ends:
            choice = choices.pop(end.sequence_id, None)
            if choice is not None:
                del lists[end.sequence_id]
                choice.ended(end)

    def _prompt_logprobs(self, step: engine_pb2.Step) -> None:
        sequence_ids = uint64_list(step.prompt_sequence_ids)
        for row in step.prompt_logprobs:
            choice = self._choices.get(sequence_ids[row.row])
            if choice is not None:
                choice.prompt_logprobs(row)
