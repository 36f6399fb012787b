"""Connects to the system given on the command line and chooses the kind of its prompts."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roster_client.bench.load.grpc_target import Calls, GrpcTarget
from roster_client.bench.load.prompts import PLAIN_WORDS, text_prompts, token_prompts, words_of_tokenizer
from roster_client.bench.load.workload import PromptMaker
from roster_client.bench.runs import provenance
from roster_client.bench.runs.measurement import SystemUnderLoad
from roster_client.bench.runs.service_watch import service_settings
from roster_client.client.credentials import IN_THE_CLEAR, Credentials
from roster_client.client.errors import RosterError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Connection:
    """Address and protocol of the system; `openai` (a base URL) takes precedence over `server` (gRPC)."""

    server: str
    openai: str = ""
    admin: str = ""
    """Admin address of a Roster server; "" if none is to be used."""
    name: str = ""
    """Name in tables; "" for that of the policy or host."""
    card: str = ""
    model: str = ""
    calls: Calls = Calls.SESSION
    sessions: int = 1
    chat: bool = False
    api_key: str = ""
    tokenizer: Path | None = None
    ignore_eos: bool = True
    speculate: bool | None = None
    """Whether a Roster server may draft tokens; None: its default."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    credentials: Credentials = IN_THE_CLEAR


@dataclass(frozen=True, slots=True)
class Connected:
    """A system, whose target is not yet entered, and a function from a salt to its prompt maker."""

    system: SystemUnderLoad
    prompts: Callable[[int], PromptMaker]


async def connect(given: Connection) -> Connected:
    """Queries the system's model. Raises RosterError or ValueError if there is none."""
    return await (_openai(given) if given.openai else _grpc(given))


async def _grpc(given: Connection) -> Connected:
    target = GrpcTarget(
        given.server,
        calls=given.calls,
        sessions=given.sessions,
        ignore_eos=given.ignore_eos,
        speculate=given.speculate,
        credentials=given.credentials,
    )
    async with target:
        model = await target.model()
    settings, admin = await _service(given)
    host = given.server.rpartition(":")[0]
    system = SystemUnderLoad(
        name=given.name or str(settings.get("policy") or "roster"),
        target=target,
        model=model.name,
        card=given.card or _card(host, str(settings.get("device", ""))),
        settings=settings,
        admin=admin,
        credentials=given.credentials,
    )
    return Connected(system, lambda salt: token_prompts(model.vocab_size, salt))


async def _openai(given: Connection) -> Connected:
    from roster_client.bench.load.openai_target import OpenAITarget, served_model

    model = given.model or await served_model(given.openai, given.api_key)
    target = OpenAITarget(
        given.openai,
        model,
        chat=given.chat,
        api_key=given.api_key,
        ignore_eos=given.ignore_eos,
        extra_body=given.extra_body,
    )
    words = words_of_tokenizer(given.tokenizer) if given.tokenizer else PLAIN_WORDS
    settings, admin = await _service(given)
    parts = urllib.parse.urlsplit(given.openai)
    system = SystemUnderLoad(
        name=given.name or str(settings.get("policy") or parts.netloc),
        target=target,
        model=model,
        card=given.card or _card(parts.hostname or "", str(settings.get("device", ""))),
        settings=settings | {"prompts": "words of the tokenizer" if given.tokenizer else "short English words"},
        admin=admin,
        credentials=given.credentials,
    )
    return Connected(system, lambda salt: text_prompts(words, salt))


async def _service(given: Connection) -> tuple[dict[str, Any], str]:
    """Returns (settings from the admin API, its address), both empty if it does not answer."""
    if not given.admin:
        return {}, ""
    try:
        return await service_settings(given.admin, given.credentials), given.admin
    except RosterError:
        return {}, ""


def _card(host: str, device: str) -> str:
    """Returns the hardware of the host, if that is this machine."""
    if host not in LOOPBACK:
        return f"unknown, at {host} (set it with --card)"
    on_gpu = "cuda" in device or not device
    return (provenance.gpu_card() if on_gpu else None) or provenance.cpu_card()
