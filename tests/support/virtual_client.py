"""A whole service in one thread: the client's logic for resuming streams, the front's request streams, and a `Stack`.

Only sockets and time are simulated: `validate`, `RequestStream`, `Assembler` and `Resumption` are those of the service
and its client. The test moves messages over the links.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roster_client.client.errors import RosterError, from_status
from roster_client.client.events import Assembler, Completion
from roster_client.client.resumption import NextCall, Resumption, repeatable
from roster_protos import engine_pb2
from roster_protos import inference_pb2 as pb
from scheduler_svc.constrained.process.compiler import grammar_text
from scheduler_svc.front.base.refusal import Refusal
from scheduler_svc.front.request.validation import validate
from scheduler_svc.front.rpc.response_stream import _next_response
from scheduler_svc.front.stream.engine_client import EngineClient
from scheduler_svc.front.stream.request_stream import RequestStream
from scheduler_svc.front.text.tokenizer import ModelText
from tests.support.fake_links import FakeFront
from tests.support.in_process import Stack

POOL_TOKENS = 1 << 20


class VirtualLine(EngineClient):
    """An engine client that sends its commands to a list."""

    def __init__(self, front: FakeFront) -> None:
        super().__init__("", 0, lambda state: None)
        self._front = front

    def send(self, command: engine_pb2.Command) -> None:
        self._front.put(**{command.WhichOneof("command") or "": getattr(command, command.WhichOneof("command") or "")})

    def take(self, message: engine_pb2.FromEngine) -> None:
        """Takes a message from the engine."""
        self._dispatch(message)


class VirtualService(Stack):
    """A `Stack` whose messages go to a front worker's streams."""

    def __init__(self, text: ModelText, **settings: object) -> None:
        super().__init__(**settings)
        self.text = text
        self.line = VirtualLine(self.front)
        self.clients: list[VirtualStream] = []

    def _take(self, message: engine_pb2.FromEngine) -> None:
        self.line.take(message)

    def step(self) -> None:
        """Runs one engine step; the clients take its messages."""
        super().step()
        for client in getattr(self, "clients", ()):
            client.pump()

    def restart_scheduler(self) -> None:
        """Kills the engine and its front workers; clients with broken streams attach to the next engine."""
        self.line.lose()
        self.line = VirtualLine(self.front)
        super().restart_scheduler()

    def generate(self, request: pb.GenerateRequest, constraint: tuple[str, str] | None = None) -> VirtualStream:
        """Sends a request. `constraint`: its kind and text, which replace the request's own."""
        self.clients.append(VirtualStream(self, request, constraint))
        return self.clients[-1]

    def attach_to(self, request_id: str, received: list[int]) -> VirtualStream:
        """Attaches another client to a request, with the number of tokens that it has of each choice."""
        self.clients.append(VirtualStream(self, pb.GenerateRequest(request_id=request_id), received=received))
        return self.clients[-1]


class VirtualStream:
    """One request as a client sees it, over any number of connections."""

    def __init__(
        self,
        service: VirtualService,
        request: pb.GenerateRequest,
        constraint: tuple[str, str] | None = None,
        received: list[int] | None = None,
    ) -> None:
        """With `received`, starts with an Attach from these cursors."""
        self._service = service
        self._request = repeatable(request)
        self._grammar = grammar_text(*constraint) if constraint is not None else ""
        self._assembler = Assembler(tuple(received or [len(request.received_token_ids)]))
        known = self._request if received is None else None
        self._resumption = Resumption(self._assembler, known, patience_s=1e9)
        self._announced = False
        self.prompts: list[pb.PromptInfo] = []
        """Prompt information from each connection."""
        self.error: RosterError | None = None
        """Error that ended the stream, if no usage did."""
        if received is None:
            self._open(NextCall.GENERATE, self._request)
        else:
            self.attach()

    @property
    def completion(self) -> Completion:
        """What has been received so far."""
        return self._assembler.completion

    @property
    def over(self) -> bool:
        """Whether the stream has ended."""
        return self.completion.usage is not None or self.error is not None

    def attach(self) -> None:
        """Takes the stream over with another call, from the tokens received so far."""
        attach = pb.AttachRequest(request_id=self._request.request_id, received=self._assembler.received)
        self._open(NextCall.ATTACH, attach)

    def send_again(self) -> None:
        """Sends the request again, as a caller does if it failed before it began."""
        assert self.completion.started is None
        self.error = None
        self._open(NextCall.GENERATE, self._request)

    def cancel(self) -> None:
        """Cancels the request and keeps reading."""
        self._stream.cancel()

    def disconnect(self) -> None:
        """Disconnects the client."""
        self._stream.disconnect()

    def pump(self) -> None:
        """Takes all pending responses, and calls again if the stream broke."""
        while not self.over:
            try:
                self._stream.raise_failure()
            except Refusal as refusal:
                self._call_again(refusal)
                return
            response = _next_response(self._stream, self._announced)
            if response is None:
                return
            self._announced = True
            if self._resumption.attach_when_accepted:
                self._open(self._resumption.accepted().call, self._resumption.attach_request())
                return
            self._resumption.progress()
            if response.HasField("prompt"):
                self.prompts.append(response.prompt)
            for _ in self._assembler.events(response):
                pass

    def _call_again(self, refusal: Refusal) -> None:
        status = refusal.session_status()
        try:
            retry = self._resumption.after(from_status(status.code, status.message, status.details))
        except RosterError as error:
            self.error = error
            return
        self._service.now_s += retry.pause_s
        resumption = self._resumption
        again = resumption.attach_request() if retry.call is NextCall.ATTACH else resumption.generate_request()
        self._open(retry.call, again)

    def _open(self, call: NextCall, request: Any) -> None:
        service, text = self._service, self._service.text
        self._announced = False
        if call is NextCall.ATTACH:
            self._stream = RequestStream(service.line, text, request.request_id, request.received, _ignore)
            self._stream.attach("")
            return
        valid = replace(validate(request, text, POOL_TOKENS), grammar=self._grammar)
        self._stream = RequestStream(service.line, text, valid.request_id, (), _ignore)
        self._stream.submit(valid, "")


def _ignore(urgent: bool) -> None:
    """Ignores the notification: the test polls."""
