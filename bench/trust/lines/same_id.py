"""Two runners with one id: the serving runner continues, and its own restart is accepted at once."""

from __future__ import annotations

import asyncio
import re
import signal
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from bench.trust.line import Line
from roster_client.client import RosterClient
from runner_svc.backends.hash_backend import expected_tokens
from scheduler_svc.link.name_contests import ANSWER_S
from tests.support.processes import RosterProcesses

RUNNER = {"device": "hash", "slots": 16, "kv_tokens": 8192, "test_backend": {"step_ms": 2, "eos_probability": 0}}
TOKENS = 64
CONCURRENCY = 16
MOST_JOINING_S = ANSWER_S / 2
LINE = re.compile(r"^(?P<time>\S+Z) \[info *\] (?P<event>ready|session begins) ", re.MULTILINE)


@dataclass(slots=True)
class Outcome:
    """Outcome; for the killed runner's successor, seconds from its start to an answer, and from Hello to session."""

    right: int = 0
    asked: int = 0
    refused_twins: int = 0
    replaced: int = 0
    restart_s: float = 0.0
    joining_s: float = 0.0


def run(quick: bool) -> Line:
    """Starts twins under load, which must be refused; then kills and restarts the runner."""
    twins = 1 if quick else 10
    with tempfile.TemporaryDirectory() as folder:
        outcome = asyncio.run(_try(Path(folder), twins))
    return Line(
        "two runners with one id under load",
        f"{outcome.right} of {outcome.asked} answers correct, {outcome.refused_twins} of {twins} twins refused, "
        f"{outcome.replaced} replacements; a killed runner's restart serves after {outcome.restart_s:.2f} s, of which "
        f"{outcome.joining_s * 1000:.0f} ms are from its Hello to its session",
        f"all correct, all refused, 0 replacements, at most {MOST_JOINING_S * 1000:.0f} ms",
        outcome.right == outcome.asked
        and outcome.refused_twins == twins
        and not outcome.replaced
        and outcome.joining_s <= MOST_JOINING_S,
    )


async def _try(folder: Path, twins: int) -> Outcome:
    outcome = Outcome()
    (folder / "twin").mkdir()
    roster = RosterProcesses(folder, runner=RUNNER)
    twin = RosterProcesses(folder / "twin", runner=roster.settings("runner"))
    try:
        with roster:
            async with RosterClient(roster.address, reconnect_s=60) as client:
                over = asyncio.Event()
                load = [asyncio.create_task(_ask(client, number, over, outcome)) for number in range(CONCURRENCY)]
                for _ in range(twins):
                    twin.start_one("runner")
                    outcome.refused_twins += await asyncio.to_thread(twin.wait, "runner") == 1
                over.set()
                await asyncio.gather(*load)
                outcome.replaced = (folder / "scheduler.log").read_text().count("a runner is lost")
                roster.end("runner", signal.SIGKILL)
                begin_at = time.monotonic()
                roster.start_one("runner")
                await client.generate([1], max_tokens=1).completion()
                outcome.restart_s = time.monotonic() - begin_at
                outcome.joining_s = _joining_s((folder / "runner.log").read_text())
    finally:
        twin.stop()
    return outcome


def _joining_s(log: str) -> float:
    """Returns the seconds from the last process's readiness to its first session."""
    (*_, ready, begins) = [datetime.fromisoformat(line["time"]) for line in LINE.finditer(log)]
    return (begins - ready).total_seconds()


async def _ask(client: RosterClient, number: int, over: asyncio.Event, outcome: Outcome) -> None:
    prompt = [number, 1]
    expected = expected_tokens(prompt, TOKENS, eos_probability=0)
    while not over.is_set():
        outcome.asked += 1
        answer = await client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, temperature=0.0).completion()
        outcome.right += answer.choices[0].token_ids == expected
