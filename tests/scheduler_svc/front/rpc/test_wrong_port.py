"""A call that reaches the wrong listener is refused with the port that is meant."""

from __future__ import annotations

from unittest import mock

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc
from structlog.testing import capture_logs

from roster_client.client.admin import AdminClient
from roster_client.client.async_client import RosterClient
from roster_client.client.errors import NotSupportedError
from scheduler_svc.front.auth.server_credentials import TokenInterceptor
from scheduler_svc.front.request.tenant import Tenants
from scheduler_svc.front.rpc.wrong_port import GATEWAY_IS_OFF, GATEWAY_SERVICE, ServedElsewhere
from scheduler_svc.settings.scheduler_settings import SchedulerSettings
from tests.support.front_stack import front_stack

HEALTH_REQUEST = vllm_engine_pb2.HealthCheckRequest()


async def test_clients_and_operators_at_each_other_s_port() -> None:
    async with front_stack() as stack:
        settings = stack.worker._settings
        async with RosterClient(settings.admin_listen) as client:
            with pytest.raises(NotSupportedError) as refused:
                await client.generate("hello").completion()
            assert str(refused.value).endswith(
                f"that is the operators' port; clients call {settings.listen} (the setting listen)"
            )
            with pytest.raises(NotSupportedError, match="that is the operators' port"):
                await client.get_model()
        async with AdminClient(settings.listen) as operator:
            with pytest.raises(NotSupportedError) as refused:
                await operator.get_status()
            assert str(refused.value).endswith(
                f"that is the clients' port; operators call {settings.admin_listen} (the setting admin_listen)"
            )


async def gateway_error(address: str) -> str:
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await vllm_engine_pb2_grpc.VllmEngineStub(channel).HealthCheck(HEALTH_REQUEST)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        return str(refused.value.details())


async def test_gateways() -> None:
    async with front_stack(gateway_apart=True) as stack:
        settings = stack.worker._settings
        assert await gateway_error(settings.listen) == (
            f"that is the clients' port; gateways call {settings.gateway_listen} (the setting gateway_listen)"
        )
    with mock.patch("scheduler_svc.front.worker.gateway_is_served", lambda: False):
        async with front_stack() as stack:
            with capture_logs() as logs:
                for _ in range(2):
                    assert await gateway_error(stack.address) == GATEWAY_IS_OFF
            assert [line["log_level"] for line in logs] == ["warning"]


async def test_the_sentence_needs_no_token() -> None:
    """A client at the operators' port has a client's token."""
    elsewhere = ServedElsewhere("admin_listen", SchedulerSettings(), True)
    assert GATEWAY_SERVICE in elsewhere.services
    interceptor = TokenInterceptor(
        mock.Mock(of=mock.Mock(side_effect=AssertionError), spec=Tenants), elsewhere.services
    )
    details = mock.Mock(method="/roster.v1.InferenceService/Generate", invocation_metadata=())
    handler = elsewhere.service(details)
    assert await interceptor.intercept_service(mock.AsyncMock(return_value=handler), details) is handler
    assert elsewhere.service(mock.Mock(method="/roster.admin.v1.AdminService/GetStatus")) is None


@pytest.mark.parametrize("listener", ["listen", "admin_listen"])
def test_where_a_token_is_required_no_address_is_named(listener: str) -> None:
    addresses = {"listen": "10.0.0.1:1", "admin_listen": "10.0.0.1:2", "gateway_listen": "10.0.0.1:3"}
    files = {"tokens": "a"} if listener == "listen" else {"admin_tokens": "a"}
    settings = SchedulerSettings(**addresses, **files)  # type: ignore[arg-type]
    sentences = ServedElsewhere(listener, settings, True)._sentences.values()
    assert len(sentences) == 2 and not any("10.0.0.1" in sentence for sentence in sentences)
    assert any("gateways call the address of the setting gateway_listen" in sentence for sentence in sentences)
