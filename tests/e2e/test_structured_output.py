"""Constrained output over the real services, beside unconstrained sequences and across the deaths of both services.

The hash backend picks allowed tokens at random, so any text that a grammar accepts comes up sooner or later. SmolLM2's
tests are in test_smollm2.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from roster_client.client import RosterClient
from roster_client.client.events import FinishReason
from tests.support.idle import wait_idle_at
from tests.support.json_schemas import random_schema
from tests.support.processes import RosterProcesses
from tests.support.schema_answers import assert_valid

PAGE = Path(__file__).resolve().parents[2] / "docs" / "structured-output.md"
SCHEMAS = int(os.environ.get("ROSTER_TEST_SCHEMAS", "24"))


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    processes = RosterProcesses(
        tmp_path_factory.mktemp("constrained"),
        scheduler={"check": True},
        runner={"device": "hash", "slots": 8, "test_backend": {"eos_probability": 0.01}},
    )
    with processes:
        yield processes


async def test_schemas_at_any_temperature_beside_free_sequences(roster: RosterProcesses) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(SCHEMAS)]
    async with RosterClient(roster.address) as client:
        free = client.generate("free", raw=True, max_tokens=300, ignore_eos=True, temperature=0.0).completion()
        answers = [
            client.generate(
                "x", raw=True, json_schema=schema, temperature=rng.choice([0.0, 1.0]), max_tokens=600
            ).completion()
            for schema in schemas
        ]
        beside, *completions = await asyncio.gather(free, *answers)
    for schema, completion in zip(schemas, completions, strict=True):
        assert_valid(schema, completion)
    assert len(beside.choices[0].token_ids) == 300
    await wait_idle_at(roster.admin_address)


async def test_choices_streams_and_stops(roster: RosterProcesses) -> None:
    async with RosterClient(roster.address) as client:
        many = await client.generate("x", raw=True, regex="[ab]{8}", n=4, temperature=1.0, seed=1).completion()
        texts = [choice.text for choice in many.choices]
        assert len(set(texts)) > 1 and all(re.fullmatch("[ab]{8}", text) for text in texts)
        assert {choice.finish and choice.finish.reason for choice in many.choices} == {FinishReason.STOP}
        # Stop strings and limits also cut a text before it is complete.
        cut = await client.generate("x", raw=True, regex="[ab]{9}c[ab]{9}", stop=["c"]).completion()
        assert re.fullmatch("[ab]{9}", cut.text) and cut.choices[0].finish is not None
        assert cut.choices[0].finish.stop_string == "c"
        short = await client.generate("x", raw=True, regex="[ab]{9}", max_tokens=4).completion()
        assert short.choices[0].finish is not None and short.choices[0].finish.reason is FinishReason.LENGTH
        again = await client.generate(
            "x", raw=True, regex="[ab]{9}", received_token_ids=short.choices[0].token_ids, seed=5
        ).completion()
        assert re.fullmatch("[ab]{9}", short.text + again.text)


async def test_the_pages_example(roster: RosterProcesses, capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    names: dict[str, Any] = {}
    source = source.replace("127.0.0.1:50061", roster.address)
    exec("async def example():\n" + textwrap.indent(source, "    "), names)
    await asyncio.wait_for(names["example"](), 60)
    assert json.loads(capsys.readouterr().out)["size"] in ("small", "large")


@pytest.mark.parametrize("victim", ["runner", "scheduler"])
async def test_a_death_changes_nothing(roster: RosterProcesses, victim: str) -> None:
    options = {"regex": '(\\{"[a-z]{40}": [0-9]{40}\\} ){4}', "temperature": 1.0, "seed": 7, "max_tokens": 500}
    async with RosterClient(roster.address) as client:
        expected = await client.generate("x", raw=True, **options).completion()  # type: ignore[arg-type]
        stream = client.generate("x", raw=True, **options)  # type: ignore[arg-type]
        pieces = [await anext(stream) for _ in range(5)]
        assert pieces
        assert roster.end(victim, signal.SIGKILL) == -signal.SIGKILL
        roster.start_one(victim)
        completion = await asyncio.wait_for(stream.completion(), 120)
    assert completion.choices[0].token_ids == expected.choices[0].token_ids
    assert json.loads(completion.text.split(" {")[0])


TIED: dict[str, Any] = {
    "regex": r'(\{"[a-z]{40}": [0-9]{40}\} ){4}',
    "temperature": 1.0,
    "seed": 11,
    "max_tokens": 500,
}


def send(pid: int, number: signal.Signals) -> None:
    """Sends a signal; ignores a process that has just ended, for example one killed a moment ago."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def has_loaded_the_library(pid: int) -> bool:
    return "llguidance" in Path(f"/proc/{pid}/maps").read_text()


async def test_deaths_of_mask_processes_change_nothing(roster: RosterProcesses) -> None:
    """Mask processes are killed at a mask, at a compilation, and between; scheduler and front worker live on."""
    serving = [roster.pid("scheduler"), *roster.children("scheduler")]
    loose: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "seed": 1, "temperature": 1.0}
    async with RosterClient(roster.address) as client:
        expected = await client.generate("x", raw=True, **TIED).completion()
        expected_free = await client.generate("free", raw=True, **loose).completion()
        stream = client.generate("x", raw=True, **TIED)
        beside = asyncio.create_task(client.generate("free", raw=True, **loose).completion())
        for number, hold in enumerate((True, False, True)):
            await anext(stream)
            pids = roster.mask_processes()
            for pid in pids if hold else ():  # so that its next frame is in flight when it is killed
                send(pid, signal.SIGSTOP)
            compiled = asyncio.create_task(client.generate("x", raw=True, regex=f"[ab]{{{number + 3}}}").completion())
            await asyncio.sleep(0.3)
            for pid in pids:
                send(pid, signal.SIGKILL)
            assert len((await compiled).text) == number + 3
        completion = await asyncio.wait_for(stream.completion(), 120)
        assert completion.choices[0].token_ids == expected.choices[0].token_ids
        assert (await beside).choices[0].token_ids == expected_free.choices[0].token_ids
        assert [roster.pid("scheduler"), *roster.children("scheduler")] == serving
        assert len(roster.mask_processes()) == 2
        assert all(has_loaded_the_library(pid) for pid in roster.mask_processes())
        assert not any(has_loaded_the_library(pid) for pid in serving)
