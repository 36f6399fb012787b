"""The public gRPC service, implemented with this worker's engine client, streams and model text."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from roster_protos import engine_pb2, inference_pb2, inference_pb2_grpc
from scheduler_svc.front.base.refusal import Refusal, abort, invalid
from scheduler_svc.front.request.preparation import Preparer
from scheduler_svc.front.request.tenant import Tenants
from scheduler_svc.front.request.validation import check_conversation_id
from scheduler_svc.front.rpc.pacing import FlushGate, MessagePacer
from scheduler_svc.front.rpc.response_stream import write_responses
from scheduler_svc.front.rpc.session import Session
from scheduler_svc.front.stream.engine_client import EngineClient
from scheduler_svc.front.stream.request_stream import RequestStream
from scheduler_svc.front.text.served_model import ServedModel
from scheduler_svc.front.tracing.tracing import Tracing


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Implements `roster.v1.InferenceService` in one worker."""

    def __init__(
        self,
        client: EngineClient,
        served: ServedModel,
        preparer: Preparer,
        pacer: MessagePacer,
        tenants: Tenants | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._client = client
        self._served = served
        self._preparer = preparer
        self._pacer = pacer
        self._tenants = tenants or Tenants()
        self._tracing = tracing or Tracing()

    async def Generate(self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams the answer to one request."""
        gate = FlushGate(self._pacer)
        trace = self._tracing.begin(context.invocation_metadata())
        try:
            tenant = self._tenants.of(context.invocation_metadata())
            prepared = await self._preparer.prepare(request, context.time_remaining())
            stream = RequestStream(self._client, prepared.text, prepared.valid.request_id, (), gate.notify)
            if trace is not None:
                trace.submitted(prepared.valid, tenant, self._served.model.name)
            stream.submit(prepared.valid, tenant, trace)
            await write_responses(stream, gate, context.write)
        except Refusal as refusal:
            if trace is not None:
                trace.refused(refusal)
            await abort(context, refusal)

    async def Attach(self, request: inference_pb2.AttachRequest, context: grpc.aio.ServicerContext) -> None:
        """Resumes a stream from a cursor per choice."""

        async def write(response: inference_pb2.GenerateResponse) -> None:
            await context.write(inference_pb2.AttachResponse(response=response))

        gate = FlushGate(self._pacer)
        try:
            tenant = self._tenants.of(context.invocation_metadata())
            text = self._served.text()
            stream = RequestStream(self._client, text, request.request_id, request.received, gate.notify)
            stream.attach(tenant)
            await write_responses(stream, gate, write)
        except Refusal as refusal:
            await abort(context, refusal)

    async def Session(
        self, request_iterator: AsyncIterator[inference_pb2.SessionRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """Multiplexes requests over one stream. It reads messages from `context`, not from `request_iterator`."""
        try:
            tenant = self._tenants.of(context.invocation_metadata())
            session = Session(
                self._client, self._served, self._preparer, self._pacer, context, tenant, tracing=self._tracing
            )
            await session.run()
        except Refusal as refusal:
            await abort(context, refusal)

    async def Cancel(
        self, request: inference_pb2.CancelRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.CancelResponse:
        """Ends a request of the caller's tenant, no matter which call follows it."""
        handle = self._client.new_handle()
        try:
            tenant = self._tenants.of(context.invocation_metadata())
            cancel = engine_pb2.CancelById(handle=handle, tenant=tenant, request_id=request.request_id)
            await self._client.call(handle, engine_pb2.Command(cancel_by_id=cancel))
        except Refusal as refusal:
            await abort(context, refusal)
        return inference_pb2.CancelResponse()

    async def ForgetConversation(
        self, request: inference_pb2.ForgetConversationRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ForgetConversationResponse:
        """Removes what is cached of a conversation of the caller's tenant."""
        handle = self._client.new_handle()
        try:
            if not request.conversation_id:
                raise invalid("conversation_id", "it is empty; name the conversation to forget")
            check_conversation_id(request.conversation_id)
            tenant = self._tenants.of(context.invocation_metadata())
            forget = engine_pb2.Forget(handle=handle, tenant=tenant, conversation_id=request.conversation_id)
            answer = await self._client.call(handle, engine_pb2.Command(forget=forget))
        except Refusal as refusal:
            await abort(context, refusal)
        return inference_pb2.ForgetConversationResponse(tokens=answer.forgotten.tokens)

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetModelResponse:
        """Describes the model."""
        try:
            model = self._served.model
        except Refusal as refusal:
            await abort(context, refusal)
        return inference_pb2.GetModelResponse(
            name=model.name,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            context_length=model.context_length,
            eos_token_ids=model.eos_token_ids,
            chat_template=model.chat_template,
            weights_version=model.weights_version,
            decoder=model.decoder,
            weight_formats=model.weight_formats,
            numerics=model.numerics,
        )

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        """Returns the token ids of a prompt."""
        try:
            return inference_pb2.TokenizeResponse(token_ids=await self._preparer.tokenize(request))
        except Refusal as refusal:
            await abort(context, refusal)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        """Returns the text of token ids."""
        try:
            return inference_pb2.DetokenizeResponse(text=await self._preparer.detokenize(request))
        except Refusal as refusal:
            await abort(context, refusal)
