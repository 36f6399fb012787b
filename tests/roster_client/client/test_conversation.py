"""`Conversation` on both clients: it keeps the messages, and its requests carry its id and hints."""

from __future__ import annotations

import pytest

from roster_client import Conversation, Message, RosterClient, SyncConversation, SyncRosterClient
from roster_protos import inference_pb2 as pb
from tests.support.scripted_server import ScriptedServer


def texts(request: pb.GenerateRequest) -> list[tuple[str, str]]:
    return [(message.role, message.parts[0].text) for message in request.prompt.chat.messages]


def check(requests: list[pb.GenerateRequest], conversation_id: str) -> None:
    first, second = requests
    assert texts(first) == [("system", "be brief"), ("user", "list the files")]
    assert texts(second) == [*texts(first), ("assistant", "list the files "), ("tool", "a.txt")]
    assert first.conversation_id == second.conversation_id == conversation_id != ""
    assert (first.kv_retain_s, first.next_turn_s) == (60, 2.5)
    assert second.HasField("kv_retain_s") and not second.HasField("next_turn_s")
    assert second.stop.max_tokens == 7


async def test_the_asyncio_conversation(server: ScriptedServer) -> None:
    async with RosterClient(server.target) as client:
        async with Conversation(client, system="be brief", kv_retain_s=60) as conversation:
            await conversation.ask("list the files", next_turn_s=2.5)
            conversation.add(Message("tool", "a.txt"))
            assert (await conversation.ask(max_tokens=7)).text == "a.txt "
        check(server.requests, conversation.id)
        assert server.forgotten == [conversation.id]
        assert await client.forget("other") == 48


def test_the_blocking_conversation(server: ScriptedServer) -> None:
    with SyncRosterClient(server.target) as client:
        with SyncConversation(client, system="be brief", kv_retain_s=60, conversation_id="mine") as conversation:
            conversation.ask("list the files", next_turn_s=2.5)
            conversation.add(Message("tool", "a.txt"))
            conversation.ask(max_tokens=7)
        check(server.requests, "mine")
        assert server.forgotten == ["mine"]
        assert client.forget("other") == 48


async def test_a_conversation_that_failed_is_kept(server: ScriptedServer) -> None:
    async with RosterClient(server.target) as client:
        with pytest.raises(RuntimeError):
            async with Conversation(client):
                raise RuntimeError
    assert server.forgotten == []


async def test_a_turn_needs_a_message(server: ScriptedServer) -> None:
    async with RosterClient(server.target) as client:
        with pytest.raises(ValueError, match="the conversation has no messages: pass one"):
            await Conversation(client).ask()
