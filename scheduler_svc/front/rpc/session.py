"""One Session stream: many requests of one client, identified by tags, with one message per flush for all of them.

The client chooses the tags. A new request under a tag in use, or an empty action, is an error in the client's program
and ends the whole session with INVALID_ARGUMENT, as the answers of two requests under one tag could not be
distinguished. A cancel for a free tag is ignored, as its request may just have ended.

Within a message, `accepted`, `prompt` and `refused` events precede the rows; `finish` and `usage` follow them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

import grpc

from roster_protos import inference_pb2
from scheduler_svc.front.base.refusal import Refusal, invalid
from scheduler_svc.front.request.preparation import PreparedRequest, Preparer
from scheduler_svc.front.rpc.decoding import Undecodable
from scheduler_svc.front.rpc.pacing import FlushGate, MessagePacer
from scheduler_svc.front.rpc.session_columns import SessionColumns
from scheduler_svc.front.stream.engine_client import EngineClient
from scheduler_svc.front.stream.request_stream import RequestStream
from scheduler_svc.front.text.served_model import ServedModel
from scheduler_svc.front.tracing.request_trace import RequestTrace
from scheduler_svc.front.tracing.tracing import Tracing

MOST_OPEN_TAGS = 8192
"""Maximum number of open requests of one session. At this number, no action is read until an end has been written,
which bounds the cost of a client that does not read."""

ROWS_PER_MESSAGE_COST = 2
"""Number of rows that cost the pacer as much as a separate message."""


@dataclass(slots=True, eq=False)
class _Tagged:
    """The request of a tag. `stream` is None while the request is being prepared in a thread."""

    tag: int
    stream: RequestStream | None = None
    refusal: Refusal | None = None
    trace: RequestTrace | None = None
    announced: bool = False
    cancelled: bool = False
    dirty: bool = False


class Session:
    """Reads actions in a separate task and writes flushes from `run`."""

    def __init__(
        self,
        client: EngineClient,
        served: ServedModel,
        preparer: Preparer,
        pacer: MessagePacer,
        context: grpc.aio.ServicerContext,
        tenant: str,
        *,
        tracing: Tracing,
    ) -> None:
        self._client = client
        self._served = served
        self._preparer = preparer
        self._context = context
        self._tenant = tenant
        self._tracing = tracing
        self._gate = FlushGate(pacer)
        self._tagged: dict[int, _Tagged] = {}
        self._dirty: list[_Tagged] = []
        self._preparing: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        self._room.set()
        self._half_closed = False
        self._violation: Refusal | None = None

    async def run(self) -> None:
        """Serves until the client has closed its side and every request has ended. Raises Refusal on misuse."""
        reader = asyncio.create_task(self._read())
        try:
            while not (self._half_closed and not self._tagged):
                await self._gate.wait()
                if self._violation is not None:
                    raise self._violation
                response = self._flush()
                if response is not None:
                    await self._context.write(response)
        finally:
            reader.cancel()
            for task in self._preparing:
                task.cancel()
            for tagged in self._tagged.values():
                if tagged.stream is not None:
                    tagged.stream.disconnect()

    async def _read(self) -> None:
        try:
            while True:
                await self._room.wait()
                request = await self._context.read()
                if request is grpc.aio.EOF:
                    break
                if isinstance(request, Undecodable):
                    raise request.refusal()
                self._act(request)
                if len(self._tagged) >= MOST_OPEN_TAGS:
                    self._room.clear()
        except Refusal as violation:
            self._violation = violation
        self._half_closed = True
        self._gate.notify(urgent=True)

    def _act(self, request: inference_pb2.SessionRequest) -> None:
        action = request.WhichOneof("action")
        if action == "cancel":
            self._cancel(request.tag)
        elif action is None:
            raise invalid("action", "set generate, cancel or attach")
        elif request.tag in self._tagged:
            raise invalid("tag", f"{request.tag} is in use; a tag can be reused after its usage or refused event")
        else:
            tagged = self._tagged[request.tag] = _Tagged(request.tag)
            if action == "generate":
                self._generate(tagged, request.generate)
            else:
                self._attach(tagged, request.attach)

    def _cancel(self, tag: int) -> None:
        tagged = self._tagged.get(tag)
        if tagged is not None:
            tagged.cancelled = True
            if tagged.stream is not None:
                tagged.stream.cancel()

    def _generate(self, tagged: _Tagged, request: inference_pb2.GenerateRequest) -> None:
        tagged.trace = self._tracing.begin(self._context.invocation_metadata())
        if self._preparer.is_quick(request, request.prompt):
            try:
                self._submit(tagged, self._preparer.prepare_now(request, self._context.time_remaining()))
            except Refusal as refusal:
                self._refuse(tagged, refusal)
        else:
            task = asyncio.create_task(self._generate_big(tagged, request))
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)

    async def _generate_big(self, tagged: _Tagged, request: inference_pb2.GenerateRequest) -> None:
        try:
            self._submit(tagged, await self._preparer.prepare(request, self._context.time_remaining()))
        except Refusal as refusal:
            self._refuse(tagged, refusal)

    def _submit(self, tagged: _Tagged, prepared: PreparedRequest) -> None:
        on_touched = partial(self._touched, tagged)
        stream = RequestStream(self._client, prepared.text, prepared.valid.request_id, (), on_touched)
        if tagged.trace is not None:
            tagged.trace.submitted(prepared.valid, self._tenant, self._served.model.name)
        stream.submit(prepared.valid, self._tenant, tagged.trace)
        tagged.stream = stream
        if tagged.cancelled:
            stream.cancel()

    def _attach(self, tagged: _Tagged, request: inference_pb2.AttachRequest) -> None:
        try:
            on_touched = partial(self._touched, tagged)
            stream = RequestStream(self._client, self._served.text(), request.request_id, request.received, on_touched)
            stream.attach(self._tenant)
            tagged.stream = stream
        except Refusal as refusal:
            self._refuse(tagged, refusal)

    def _refuse(self, tagged: _Tagged, refusal: Refusal) -> None:
        tagged.refusal = refusal
        if tagged.trace is not None:
            tagged.trace.refused(refusal)
        self._touched(tagged, True)

    def _touched(self, tagged: _Tagged, urgent: bool) -> None:
        if not tagged.dirty:
            tagged.dirty = True
            self._dirty.append(tagged)
            if len(self._dirty) == 1:
                self._gate.notify(urgent)
                return
        if urgent:
            self._gate.notify(True)

    def _flush(self) -> inference_pb2.SessionResponse | None:
        """Returns the output of all requests since the last flush, None if there is none."""
        dirty, self._dirty = self._dirty, []
        columns = SessionColumns()
        for tagged in dirty:
            tagged.dirty = False
            if self._take(tagged, columns):
                del self._tagged[tagged.tag]
                self._room.set()
        self._gate.weight = 1.0 + len(columns.tags) / ROWS_PER_MESSAGE_COST
        return columns.response()

    def _take(self, tagged: _Tagged, columns: SessionColumns) -> bool:
        """Moves the pending output of a request to the columns. Returns whether its tag is free now."""
        stream = tagged.stream
        refusal = tagged.refusal if stream is None else stream.failure
        if refusal is not None:
            columns.events.add(tag=tagged.tag, refused=refusal.session_status())
            return True
        if stream is None:
            return False
        tag = tagged.tag
        if not tagged.announced:
            tagged.announced = True
            columns.events.add(tag=tag, accepted=stream.request_id)
        filled = False
        for choice in stream.choices:
            piece = choice.take_piece()
            if piece is not None:
                filled = True
                columns.add(tag, choice, piece)
            if choice.finish_pending:
                filled = True
                columns.events.add(tag=tag, finish=choice.take_finish())
        prompt = stream.take_prompt(force=filled)
        if prompt is not None:
            columns.events.add(tag=tag, prompt=prompt)
        usage = None if stream.open_choices else stream.take_usage()
        if usage is None:
            return False
        columns.events.add(tag=tag, usage=usage)
        return True
