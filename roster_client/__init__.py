"""The typed client of Roster and the `roster` command.

    from roster_client import Message, RosterClient

Names are imported on first use, so that the `roster` command starts without gRPC.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roster_client.client.admin import AdminClient
    from roster_client.client.async_client import EventStream, RosterClient
    from roster_client.client.conversation import Conversation, SyncConversation
    from roster_client.client.credentials import Credentials
    from roster_client.client.errors import (
        AlreadyExistsError,
        DeadlineError,
        InvalidRequestError,
        NotFoundError,
        NotSupportedError,
        OverloadedError,
        RequestCancelledError,
        RosterError,
        StreamGapError,
        UnavailableError,
    )
    from roster_client.client.events import (
        Choice,
        Completion,
        Delta,
        Finish,
        FinishReason,
        Started,
        TokenLogprobs,
        Usage,
    )
    from roster_client.client.requests import Message, OnDisconnect
    from roster_client.client.session import Session, SessionStream
    from roster_client.client.sync_client import SyncEventStream, SyncRosterClient
    from roster_client.offline.llm import LLM
    from roster_client.offline.own_services import ServicesFailedError

_MODULES = {
    "admin": ["AdminClient"],
    "async_client": ["EventStream", "RosterClient"],
    "conversation": ["Conversation", "SyncConversation"],
    "credentials": ["Credentials"],
    "errors": [
        "AlreadyExistsError",
        "DeadlineError",
        "InvalidRequestError",
        "NotFoundError",
        "NotSupportedError",
        "OverloadedError",
        "RequestCancelledError",
        "RosterError",
        "StreamGapError",
        "UnavailableError",
    ],
    "events": ["Choice", "Completion", "Delta", "Finish", "FinishReason", "Started", "TokenLogprobs", "Usage"],
    "requests": ["Message", "OnDisconnect"],
    "session": ["Session", "SessionStream"],
    "sync_client": ["SyncEventStream", "SyncRosterClient"],
}
_MODULE_OF = {name: f"roster_client.client.{module}" for module, names in _MODULES.items() for name in names}
_MODULE_OF |= {"LLM": "roster_client.offline.llm", "ServicesFailedError": "roster_client.offline.own_services"}

__all__ = [
    "LLM",
    "AdminClient",
    "AlreadyExistsError",
    "Choice",
    "Completion",
    "Conversation",
    "Credentials",
    "DeadlineError",
    "Delta",
    "EventStream",
    "Finish",
    "FinishReason",
    "InvalidRequestError",
    "Message",
    "NotFoundError",
    "NotSupportedError",
    "OnDisconnect",
    "OverloadedError",
    "RequestCancelledError",
    "RosterClient",
    "RosterError",
    "ServicesFailedError",
    "Session",
    "SessionStream",
    "Started",
    "StreamGapError",
    "SyncConversation",
    "SyncEventStream",
    "SyncRosterClient",
    "TokenLogprobs",
    "UnavailableError",
    "Usage",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
