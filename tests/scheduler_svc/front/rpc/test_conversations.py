"""ForgetConversation names a conversation of the caller's tenant."""

from __future__ import annotations

import grpc
import pytest

from roster_protos import inference_pb2 as pb
from tests.support.front_stack import front_stack


async def test_a_conversation_of_the_callers_tenant_is_forgotten() -> None:
    async with front_stack() as stack:
        forget = pb.ForgetConversationRequest(conversation_id="mine")
        answer = await stack.stub.ForgetConversation(forget, metadata=(("roster-tenant", "acme"),))
        assert answer.tokens == 32 and stack.engine.forgotten == [("acme", "mine")]


@pytest.mark.parametrize(("name", "words"), [("", "it is empty; name"), ("x" * 129, "it has 129 bytes; use at most")])
async def test_a_wrong_id_is_refused(name: str, words: str) -> None:
    async with front_stack() as stack:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stack.stub.ForgetConversation(pb.ForgetConversationRequest(conversation_id=name))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in str(refused.value.details())
