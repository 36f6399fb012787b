"""Several Rosters behind one gateway: a prefix is routed to where it is cached, and a dead server is avoided."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("openai")
pytest.importorskip("smg_grpc_proto")

import openai

from roster_client.client.sync_client import SyncRosterClient
from tests.support.gateway import openai_client
from tests.support.processes import RosterProcesses
from tests.support.roster_command import assert_gone

QUESTION_BYTES = 600
EVENTS_S = 1.0
"""Far longer than an event takes to reach the gateway."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RosterProcesses]]:
    with contextlib.ExitStack() as stack:
        folders = [tmp_path_factory.mktemp(f"roster-{number}") for number in range(2)]
        yield [stack.enter_context(RosterProcesses(folder, runner={"device": "hash"})) for folder in folders]


@pytest.fixture(scope="module")
def early(fleet: list[RosterProcesses]) -> list[str]:
    """Questions sent to the Rosters before the gateway starts."""
    return asked_directly(fleet, seed=0)


@pytest.fixture(scope="module")
def client(
    fleet: list[RosterProcesses], early: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    folder: Path = tmp_path_factory.mktemp("gateway")
    with openai_client(folder, *[roster.address for roster in fleet], policy="cache_aware") as opened:
        yield opened


def ask(client: openai.OpenAI, text: str) -> int:
    """Asks, and returns how many of the prompt's tokens were cached."""
    usage = client.completions.create(model="hash", prompt=text, max_tokens=2, temperature=0).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


def asked_directly(fleet: list[RosterProcesses], seed: int) -> list[str]:
    """Sends ten questions to the Rosters in turn, without the gateway; returns them."""
    rng = random.Random(seed)
    questions = ["".join(rng.choices("abcdefgh ", k=QUESTION_BYTES)) for _ in range(10)]
    for number, question in enumerate(questions):
        with SyncRosterClient(fleet[number % 2].address) as direct:
            direct.generate(question, raw=True, max_tokens=2).completion()
    return questions


def sent_where_they_are_cached(client: openai.OpenAI, questions: list[str]) -> int:
    """Returns how many of the questions the gateway routes to their cached prefix; by chance it would be half."""
    time.sleep(EVENTS_S)
    return sum(ask(client, f"{question}, and more") >= QUESTION_BYTES - 32 for question in questions)


def test_a_prefix_goes_where_it_is_cached(
    client: openai.OpenAI, fleet: list[RosterProcesses], early: list[str]
) -> None:
    """The gateway has routed none of these prompts: it learns of them through SubscribeKvEvents."""
    assert sent_where_they_are_cached(client, early) >= 9, "prefixes in the snapshot"
    assert sent_where_they_are_cached(client, asked_directly(fleet, seed=1)) >= 9, "prefixes cached since the snapshot"


def test_a_dead_server_is_avoided_and_found_again(client: openai.OpenAI, fleet: list[RosterProcesses]) -> None:
    victim = fleet[0]
    workers = [psutil.Process(pid) for pid in victim.children("scheduler")]
    assert victim.end("scheduler", signal.SIGKILL) == -signal.SIGKILL
    assert_gone(workers)  # they live a moment longer, and would answer in place of the next scheduler's
    texts = [f"{number} of many questions" for number in range(8)]
    for text in texts:
        ask(client, text)
    victim.start_one("scheduler")
    victim.wait_ready()
    for text in texts:
        ask(client, text)
    # The gateway resumes a worker's events on its own schedule; it learns missed changes from later events.
    deadline, seed = time.monotonic() + 60, 2
    while (right := sent_where_they_are_cached(client, asked_directly(fleet, seed))) < 9:
        assert time.monotonic() < deadline, f"only {right} of 10 prefixes were routed to the new scheduler's cache"
        seed += 1
