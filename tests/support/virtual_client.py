"""A whole service in one thread: the client's own way of taking a stream up again, the front's request streams, and the
engine and runners of a `Stack`, with links that a test moves.

Nothing is stood in for but sockets and time: `validate`, `RequestStream`, `Assembler` and `Resumption` are those of the
service and of its client.
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
    """An engine client whose line is a list."""

    def __init__(self, front: FakeFront) -> None:
        super().__init__("", 0, lambda state: None)
        self._front = front

    def send(self, command: engine_pb2.Command) -> None:
        """See `EngineClient`."""
        self._front.put(**{command.WhichOneof("command") or "": getattr(command, command.WhichOneof("command") or "")})

    def take(self, message: engine_pb2.FromEngine) -> None:
        """A message of the engine has come."""
        self._dispatch(message)


class VirtualService(Stack):
    """A `Stack` whose messages go to streams of a front worker."""

    def __init__(self, text: ModelText, **settings: object) -> None:
        super().__init__(**settings)
        self.text = text
        self.line = VirtualLine(self.front)
        self.clients: list[VirtualStream] = []

    def _take(self, message: engine_pb2.FromEngine) -> None:
        self.line.take(message)

    def step(self) -> None:
        """One turn of the engine; the clients take what it brought."""
        super().step()
        for client in getattr(self, "clients", ()):
            client.pump()

    def restart_scheduler(self) -> None:
        """The engine dies with its front workers; clients whose streams broke attach to the next one."""
        self.line.lose()
        self.line = VirtualLine(self.front)
        super().restart_scheduler()

    def generate(self, request: pb.GenerateRequest, constraint: tuple[str, str] | None = None) -> VirtualStream:
        """Sends a request. `constraint`: its kind and text, in the request's place."""
        self.clients.append(VirtualStream(self, request, constraint))
        return self.clients[-1]

    def attach_to(self, request_id: str, received: list[int]) -> VirtualStream:
        """Another client asks for a request, of which it has so many tokens a choice."""
        self.clients.append(VirtualStream(self, pb.GenerateRequest(request_id=request_id), received=received))
        return self.clients[-1]


class VirtualStream:
    """One request as a client sees it, over however many connections."""

    def __init__(
        self,
        service: VirtualService,
        request: pb.GenerateRequest,
        constraint: tuple[str, str] | None = None,
        received: list[int] | None = None,
    ) -> None:
        """`received`: it begins with an Attach from these cursors."""
        self._service = service
        self._request = repeatable(request)
        self._grammar = grammar_text(*constraint) if constraint is not None else ""
        self._assembler = Assembler(tuple(received or [len(request.received_token_ids)]))
        known = self._request if received is None else None
        self._resumption = Resumption(self._assembler, known, patience_s=1e9)
        self._announced = False
        self.prompts: list[pb.PromptInfo] = []
        """What each connection told of the prompt."""
        self.error: RosterError | None = None
        """What ended it, if it was no usage."""
        if received is None:
            self._open(NextCall.GENERATE, self._request)
        else:
            self.attach()

    @property
    def completion(self) -> Completion:
        """What has come so far."""
        return self._assembler.completion

    @property
    def over(self) -> bool:
        """Nothing more comes."""
        return self.completion.usage is not None or self.error is not None

    def attach(self) -> None:
        """Takes its own stream over with another call, from the tokens that have come."""
        attach = pb.AttachRequest(request_id=self._request.request_id, received=self._assembler.received)
        self._open(NextCall.ATTACH, attach)

    def send_again(self) -> None:
        """The caller's own retry of a request that failed before it began."""
        assert self.completion.started is None
        self.error = None
        self._open(NextCall.GENERATE, self._request)

    def cancel(self) -> None:
        """The client cancels the request and listens on."""
        self._stream.cancel()

    def disconnect(self) -> None:
        """The client goes."""
        self._stream.disconnect()

    def pump(self) -> None:
        """Takes all that is pending, and calls again if the stream broke."""
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
    """The test looks by itself."""
