"""A conversation of many turns: it keeps the messages, and names itself in every request.

    async with Conversation(client, system="You are a careful agent.") as conversation:
        answer = await conversation.ask("List the files.", next_turn_s=2.0)
        conversation.add(Message("tool", listing))
        answer = await conversation.ask()

The server keeps the conversation's context in its prefix cache as long as it is likely to come back, if its retention
is `session`. What is sent never changes an answer. At its end, the conversation is forgotten there.
"""

from __future__ import annotations

from collections.abc import Sequence
from secrets import token_hex
from types import TracebackType
from typing import Generic, Self, TypeVar, Unpack

from roster_client.client.async_client import EventStream, RosterClient
from roster_client.client.events import Completion
from roster_client.client.requests import AnyMessage, Message, Options
from roster_client.client.sync_client import SyncEventStream, SyncRosterClient

Client = TypeVar("Client", RosterClient, SyncRosterClient)


class _Messages(Generic[Client]):
    """Messages and options of a conversation."""

    def __init__(
        self,
        client: Client,
        messages: Sequence[AnyMessage] = (),
        *,
        system: str = "",
        **options: Unpack[Options],
    ) -> None:
        """`system`: first message. `options` are those of all turns: `kv_retain_s`, for example, or a
        `conversation_id`, by default a random one."""
        self.id = options.get("conversation_id") or token_hex(16)
        self.messages: list[AnyMessage] = [*([Message("system", system)] if system else []), *messages]
        self._client: Client = client
        self._options = options

    def add(self, *messages: AnyMessage) -> None:
        """Adds messages, a tool's result for example, for the next turn."""
        self.messages += messages

    def _turn(self, message: str | AnyMessage | None, options: Options) -> Options:
        """Adds the message and returns the turn's options. Raises ValueError without any message."""
        if message is not None:
            self.messages.append(Message("user", message) if isinstance(message, str) else message)
        if not self.messages:
            raise ValueError("the conversation has no messages: pass one, or add some first")
        return {**self._options, **options, "conversation_id": self.id}

    def _answered(self, completion: Completion) -> Completion:
        self.messages.append(Message("assistant", completion.choices[0].text))
        return completion


class Conversation(_Messages[RosterClient]):
    """A conversation over an asyncio client. One turn at a time."""

    def stream(
        self,
        message: str | AnyMessage | None = None,
        *,
        deadline_s: float | None = None,
        **options: Unpack[Options],
    ) -> EventStream:
        """Streams the next answer; `add` it as a message once it is complete. Arguments: those of `ask`."""
        turn = self._turn(message, options)
        return self._client.chat(self.messages, deadline_s=deadline_s, **turn)

    async def ask(
        self,
        message: str | AnyMessage | None = None,
        *,
        deadline_s: float | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """Returns the next answer, and keeps it as a message.

        `message`: a user's text or a message, None to go on with those added. The option `next_turn_s` says when, after
        the answer, the next turn is expected, in seconds: because a tool runs for that long, for example.
        """
        stream = self.stream(message, deadline_s=deadline_s, **options)
        return self._answered(await stream.completion())

    async def forget(self) -> int:
        """Removes the conversation from the server's prefix cache; returns the number of tokens."""
        return await self._client.forget(self.id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.forget()


class SyncConversation(_Messages[SyncRosterClient]):
    """A conversation over a blocking client, with the methods of `Conversation`."""

    def stream(
        self,
        message: str | AnyMessage | None = None,
        *,
        deadline_s: float | None = None,
        **options: Unpack[Options],
    ) -> SyncEventStream:
        """Streams the next answer; `add` it as a message once it is complete. Arguments: those of `ask`."""
        turn = self._turn(message, options)
        return self._client.chat(self.messages, deadline_s=deadline_s, **turn)

    def ask(
        self,
        message: str | AnyMessage | None = None,
        *,
        deadline_s: float | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """Returns the next answer, and keeps it as a message (see `Conversation.ask`)."""
        stream = self.stream(message, deadline_s=deadline_s, **options)
        return self._answered(stream.completion())

    def forget(self) -> int:
        """Removes the conversation from the server's prefix cache; returns the number of tokens."""
        return self._client.forget(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.forget()
