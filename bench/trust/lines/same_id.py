"""Two runners that were given one id: the one that serves goes on serving, and its own restart is taken at once."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.trust.line import Line
from roster_client.client import RosterClient
from runner_svc.hash_model import expected_tokens
from tests.support.processes import RosterProcesses

RUNNER = {"device": "hash", "slots": 16, "kv_tokens": 8192, "step_ms": 2, "eos_probability": 0}
TOKENS = 64
CONCURRENCY = 16
MOST_RESTART_RATIO = 2.0


@dataclass(slots=True)
class Outcome:
    """What happened; seconds are those from a runner's start to the first answer."""

    right: int = 0
    asked: int = 0
    refused_twins: int = 0
    replaced: int = 0
    first_s: float = 0.0
    restart_s: float = 0.0


def run(quick: bool) -> Line:
    """Twins come and are turned away under load; then the runner is killed and started again."""
    twins = 1 if quick else 10
    with tempfile.TemporaryDirectory() as folder:
        outcome = asyncio.run(_try(Path(folder), twins))
    ratio = outcome.restart_s / outcome.first_s
    return Line(
        "two runners of one id under load",
        f"{outcome.right} of {outcome.asked} answers right, {outcome.refused_twins} of {twins} twins refused, "
        f"{outcome.replaced} replacements; a killed runner's restart serves after {outcome.restart_s:.2f} s, "
        f"{ratio:.2f} times its first start",
        f"all right, all refused, 0 replacements, at most {MOST_RESTART_RATIO} times",
        outcome.right == outcome.asked
        and outcome.refused_twins == twins
        and not outcome.replaced
        and ratio <= MOST_RESTART_RATIO,
    )


async def _try(folder: Path, twins: int) -> Outcome:
    outcome = Outcome()
    (folder / "twin").mkdir()
    roster = RosterProcesses(folder, runner=RUNNER)
    twin = RosterProcesses(folder / "twin", runner=roster.settings("runner"))
    try:
        with roster:
            async with RosterClient(roster.address, reconnect_s=60) as client:
                roster.end("runner", signal.SIGTERM)  # both starts are timed alike, with the scheduler there
                outcome.first_s = await _started(roster, client)
                over = asyncio.Event()
                load = [asyncio.create_task(_ask(client, number, over, outcome)) for number in range(CONCURRENCY)]
                for _ in range(twins):
                    twin.start_one("runner")
                    outcome.refused_twins += await asyncio.to_thread(twin.wait, "runner") == 1
                over.set()
                await asyncio.gather(*load)
                log = (folder / "scheduler.log").read_text()
                outcome.replaced = log.count("a runner is lost") - 1  # the one that left at the beginning
                roster.end("runner", signal.SIGKILL)
                outcome.restart_s = await _started(roster, client)
    finally:
        twin.stop()
    return outcome


async def _started(roster: RosterProcesses, client: RosterClient) -> float:
    """Seconds from the runner's start to an answer."""
    begin = time.monotonic()
    roster.start_one("runner")
    await client.generate([1], max_tokens=1).completion()
    return time.monotonic() - begin


async def _ask(client: RosterClient, number: int, over: asyncio.Event, outcome: Outcome) -> None:
    prompt = [number, 1]
    expected = expected_tokens(prompt, TOKENS, eos_probability=0)
    while not over.is_set():
        outcome.asked += 1
        answer = await client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, temperature=0.0).completion()
        outcome.right += answer.choices[0].token_ids == expected
