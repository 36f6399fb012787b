"""Implementation of `vllm.grpc.engine.VllmEngine` with the worker's preparation, streams and engine commands.

Token authentication and tenants are those of the public service, unless this service has an address of its own. Embed
and the profiler RPCs are UNIMPLEMENTED, which gateways tolerate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from roster_protos import admin_pb2, engine_pb2
from scheduler_svc.front.base.refusal import Refusal, abort
from scheduler_svc.front.gateway.answer_writer import AnswerWriter
from scheduler_svc.front.gateway.kv_subscriptions import KvSubscriptions
from scheduler_svc.front.gateway.load_report import LoadReporter
from scheduler_svc.front.gateway.request_mapping import to_generate_request
from scheduler_svc.front.gateway.tokenizer_bundle import bundle_chunks, model_type, special_token_ids
from scheduler_svc.front.request.preparation import Preparer
from scheduler_svc.front.request.tenant import Tenants
from scheduler_svc.front.rpc.pacing import FlushGate, MessagePacer
from scheduler_svc.front.rpc.response_stream import write_responses
from scheduler_svc.front.stream.engine_client import EngineClient
from scheduler_svc.front.stream.request_stream import RequestStream
from scheduler_svc.front.text.served_model import ServedModel
from scheduler_svc.front.tracing.tracing import Tracing


class VllmEngineService(vllm_grpc.VllmEngineServicer):
    """The gateway's service in one worker."""

    def __init__(
        self,
        client: EngineClient,
        served: ServedModel,
        preparer: Preparer,
        pacer: MessagePacer,
        tenants: Tenants,
        is_ready: Callable[[], bool],
        tracing: Tracing,
    ) -> None:
        """`is_ready`: whether new requests are accepted and the engine makes progress."""
        self._client = client
        self._served = served
        self._preparer = preparer
        self._pacer = pacer
        self._tenants = tenants
        self._is_ready = is_ready
        self._tracing = tracing
        self._loads = LoadReporter()
        self._subscriptions = KvSubscriptions(client)

    async def HealthCheck(
        self, request: vllm.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> vllm.HealthCheckResponse:
        """Returns whether requests are accepted now; a gateway sends none while they are not.

        Returns UNAVAILABLE before the first model: a gateway registers a worker on its first answer, and would then
        keep it registered without a model.
        """
        try:
            self._served.model  # noqa: B018
        except Refusal as refusal:
            await abort(context, refusal)
        if self._is_ready():
            return vllm.HealthCheckResponse(healthy=True, message="requests are accepted")
        return vllm.HealthCheckResponse(
            healthy=False, message="no runner makes progress, the server drains, or the engine hangs"
        )

    async def GetModelInfo(
        self, request: vllm.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> vllm.GetModelInfoResponse:
        """Describes the model."""
        try:
            model = self._served.model
        except Refusal as refusal:
            await abort(context, refusal)
        ids = special_token_ids(model)
        return vllm.GetModelInfoResponse(
            model_path=model.name,
            tokenizer_path=model.name,
            served_model_name=model.name,
            is_generation=True,
            max_context_length=model.context_length,
            max_req_input_len=model.context_length - 1,
            vocab_size=model.vocab_size,
            model_type=model_type(model.architecture),
            architectures=[model.architecture],
            eos_token_ids=model.eos_token_ids,
            pad_token_id=ids.get("pad_token", 0),
            bos_token_id=ids.get("bos_token", 0),
        )

    async def GetServerInfo(
        self, request: vllm.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> vllm.GetServerInfoResponse:
        """Describes the server and its load; gateways use it to tell workers apart."""
        status = await self._status(context)
        runners = status.runners
        return vllm.GetServerInfoResponse(
            active_requests=status.waiting + sum(runner.running for runner in runners),
            last_receive_timestamp=time.time(),
            uptime_seconds=status.uptime_s,
            server_type="vllm-grpc",
            data_parallel_size=1,
            block_size=runners[0].block_size if runners else 0,
            max_num_seqs=sum(runner.slots for runner in runners),
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: grpc.aio.ServicerContext) -> vllm.GetLoadsResponse:
        """Returns the current queue length and the slots and KV in use."""
        return self._loads.report(await self._status(context))

    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams the model's tokenizer as a zip file."""
        try:
            text = self._served.text()
        except Refusal as refusal:
            await abort(context, refusal)
        template = await asyncio.to_thread(text.template_for_gateway)
        for chunk in bundle_chunks(text.model, template):
            await context.write(chunk)

    async def Generate(self, request: vllm.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams the answer to one request, or writes it as a whole at the end."""
        gate = FlushGate(self._pacer)
        trace = self._tracing.begin(context.invocation_metadata())
        try:
            tenant = self._tenants.of(context.invocation_metadata())
            prepared = await self._preparer.prepare(to_generate_request(request), context.time_remaining())
            valid = prepared.valid
            stream = RequestStream(self._client, prepared.text, valid.request_id, (), gate.notify)
            if trace is not None:
                trace.submitted(valid, tenant, self._served.model.name)
            stream.submit(valid, tenant, trace)
            writer = AnswerWriter(valid.prompt, valid.n, request.stream, context.write)
            await write_responses(stream, gate, writer.write)
        except Refusal as refusal:
            if trace is not None:
                trace.refused(refusal)
            await abort(context, refusal)

    async def Abort(self, request: vllm.AbortRequest, context: grpc.aio.ServicerContext) -> vllm.AbortResponse:
        """Cancels requests of the caller's tenant; ignores unknown ids, whose requests have already ended."""
        try:
            tenant = self._tenants.of(context.invocation_metadata())
            for request_id in request.request_ids:
                await self._abort(tenant, request_id)
        except Refusal as refusal:
            await abort(context, refusal)
        return vllm.AbortResponse()

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.FlushCacheResponse:
        """Removes all prefixes from the cache. Running requests continue, so `timeout_s` is not needed."""
        handle = self._client.new_handle()
        try:
            flush = engine_pb2.FlushPrefixes(handle=handle)
            await self._client.call(handle, engine_pb2.Command(flush_prefixes=flush))
        except Refusal as refusal:
            await abort(context, refusal)
        return common_pb2.FlushCacheResponse(success=True, message="the prefix cache was cleared")

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams the prefix cache's content and its changes until the caller disconnects or the engine exits."""
        try:
            if self._tenants.need_tokens:
                raise _tells_all_tenants()
            async with self._subscriptions.follow(request.start_sequence_number) as batches:
                await context.send_initial_metadata(())  # shows that the subscription has begun before the first batch
                async for batch in batches:
                    await context.write(batch)
        except Refusal as refusal:
            await abort(context, refusal)

    def lose(self) -> None:
        """Ends every subscription with UNAVAILABLE, as the engine is gone."""
        self._subscriptions.lose()

    async def _abort(self, tenant: str, request_id: str) -> None:
        handle = self._client.new_handle()
        cancel = engine_pb2.CancelById(handle=handle, tenant=tenant, request_id=request_id)
        try:
            await self._client.call(handle, engine_pb2.Command(cancel_by_id=cancel))
        except Refusal as refusal:
            if refusal.code is not grpc.StatusCode.NOT_FOUND:
                raise

    async def _status(self, context: grpc.aio.ServicerContext) -> admin_pb2.GetStatusResponse:
        handle = self._client.new_handle()
        command = engine_pb2.Command(status_query=engine_pb2.StatusQuery(handle=handle))
        try:
            return (await self._client.call(handle, command)).status_reply.status
        except Refusal as refusal:
            await abort(context, refusal)


def _tells_all_tenants() -> Refusal:
    message = "these events expose every tenant's prompts: give the gateway an address of its own (gateway_listen)"
    return Refusal(grpc.StatusCode.PERMISSION_DENIED, message)
