"""A gRPC server for client tests: answers `Generate` from a test's script and records its requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from roster_protos import inference_pb2 as pb
from roster_protos import inference_pb2_grpc

Script = Callable[[pb.GenerateRequest, grpc.ServicerContext], Iterable[pb.GenerateResponse]]


def word_answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    """Repeats the prompt's words, one per message, for each of n choices; a word's token id is its length."""
    words = prompt_text(request.prompt).split(" ")
    n = request.n if request.HasField("n") else 1
    skipped = len(request.received_token_ids)
    yield pb.GenerateResponse(request_id=request.request_id or "drawn")
    for position, word in enumerate(words[skipped:], skipped):
        yield pb.GenerateResponse(
            deltas=[
                pb.Delta(index=index, first_index=position, token_ids=[len(word)], text=word + " ")
                for index in range(n)
            ]
        )
    finishes = [pb.Finish(index=i, reason=pb.FINISH_REASON_LENGTH, num_tokens=len(words)) for i in range(n)]
    usage = pb.Usage(prompt_tokens=len(words), completion_tokens=n * len(words), cached_tokens=1)
    usage.drafted_tokens, usage.accepted_tokens = 2, 1
    yield pb.GenerateResponse(finishes=finishes, usage=usage)


def prompt_text(prompt: pb.Prompt) -> str:
    """Returns the prompt as text: for a chat, the last message; for token ids, the ids."""
    match prompt.WhichOneof("kind"):
        case "text":
            return prompt.text
        case "user_message":
            return prompt.user_message
        case "chat":
            return "".join(part.text for part in prompt.chat.messages[-1].parts)
        case _:
            return " ".join(map(str, prompt.token_ids.ids))


def refuse(code: int, message: str, fields: dict[str, str] | None = None, retry_s: float | None = None) -> Script:
    """Returns a script that refuses with google.rpc details."""

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        status = status_pb2.Status(code=code, message=message)
        if fields:
            violations = [
                error_details_pb2.BadRequest.FieldViolation(field=name, description=text)
                for name, text in fields.items()
            ]
            status.details.add().Pack(error_details_pb2.BadRequest(field_violations=violations))
        if retry_s is not None:
            delay = duration_pb2.Duration(seconds=int(retry_s), nanos=round(retry_s % 1 * 1e9))
            status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        context.abort_with_status(rpc_status.to_status(status))
        yield pb.GenerateResponse()  # pragma: no cover (abort raises)

    return script


@dataclass
class ScriptedServer(inference_pb2_grpc.InferenceServiceServicer):
    """The service; `script` may be changed between calls. `cancelled` is set when a client closes a stream."""

    script: Script = word_answer
    chat_template: str = "{{ messages }}"
    target: str = ""
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    attaches: list[pb.AttachRequest] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def ForgetConversation(
        self, request: pb.ForgetConversationRequest, context: grpc.ServicerContext
    ) -> pb.ForgetConversationResponse:
        self.forgotten.append(request.conversation_id)
        return pb.ForgetConversationResponse(tokens=48)

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        context.add_callback(lambda: None if context.code() is not None else self.cancelled.set())
        yield from self.script(request, context)

    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> Iterator[pb.AttachResponse]:
        self.attaches.append(request)
        received = request.received[0] if request.received else 0
        words = ["zero ", "one ", "two ", "three "]
        yield pb.AttachResponse(response=pb.GenerateResponse(request_id=request.request_id))
        for position in range(received, len(words)):
            delta = pb.Delta(first_index=position, token_ids=[position], text=words[position])
            yield pb.AttachResponse(response=pb.GenerateResponse(deltas=[delta]))
        finish = pb.Finish(reason=pb.FINISH_REASON_STOP, stop_token_id=2, num_tokens=len(words))
        yield pb.AttachResponse(response=pb.GenerateResponse(finishes=[finish], usage=pb.Usage(prompt_tokens=1)))

    def Cancel(self, request: pb.CancelRequest, context: grpc.ServicerContext) -> pb.CancelResponse:
        if request.request_id == "unknown":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such request")
        self.cancels.append(request.request_id)
        return pb.CancelResponse()

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext) -> pb.GetModelResponse:
        return pb.GetModelResponse(name="words", context_length=100, chat_template=self.chat_template)

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=[len(word) for word in prompt_text(request.prompt).split(" ")])

    def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.ServicerContext) -> pb.DetokenizeResponse:
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else "unset"
        return pb.DetokenizeResponse(text=f"{list(request.token_ids)} {skip}")


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    """Serves on a free loopback port, with health SERVING."""
    service = ScriptedServer()
    server = grpc.server(ThreadPoolExecutor(8))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    healthy = health.HealthServicer()
    healthy.set("roster.v1.InferenceService", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    service.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield service
    finally:
        server.stop(0).wait()
