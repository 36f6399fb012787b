"""Generated schemas, regular expressions and grammars: each is refused with a sentence or works, and crashes nothing.

CI runs 1,000; for at most 25 minutes: `ROSTER_FUZZ_SCHEMAS=100000 pytest -s tests/fuzz/test_schemas.py`.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from roster_client.client import RosterClient
from roster_client.client.errors import InvalidRequestError
from roster_client.client.events import Completion, FinishReason
from roster_protos import inference_pb2
from tests.support.grammar_trials import GrammarTrials
from tests.support.processes import RosterProcesses
from tests.support.random_constraints import random_constraint
from tests.support.thoroughness import count

SCHEMAS = int(os.environ.get("ROSTER_FUZZ_SCHEMAS", count(2000, in_ci=1000)))
SEED = int(os.environ.get("ROSTER_FUZZ_SEED", "17"))
LIMIT_S = float(os.environ.get("ROSTER_FUZZ_SECONDS", "1500"))
SERVED = max(40, SCHEMAS // 100)
"""Number of cases sent through the services; the others only go to the compiler."""

pytestmark = pytest.mark.timeout(LIMIT_S + 300)


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    folder = tmp_path_factory.mktemp("schemas")
    with RosterProcesses(
        folder, runner={"device": "hash", "slots": 8, "test_backend": {"eos_probability": 0.01}}
    ) as processes:
        yield processes


def test_none_ends_the_process_that_compiles_it() -> None:
    """Except those that take too long: they are few, and SIGALRM ends their process."""
    print(f"seed {SEED}")
    rng, until = random.Random(SEED), time.monotonic() + LIMIT_S
    counts: Counter[str] = Counter()
    killers = []
    with GrammarTrials() as trials:
        while sum(counts.values()) < SCHEMAS and time.monotonic() < until:
            kind, text = random_constraint(rng)
            trial = trials.run(kind, text, steps=rng.choice((0, 3, 20)), seed=rng.randrange(1 << 32))
            if trial.died is not None:
                killers.append((trial.died, kind, text))
                print(*killers[-1], flush=True)
            outcome = "works" if trial.accepted is not None else "refused" if trial.died is None else str(trial.died)
            counts[f"{kind} {outcome}"] += 1
            assert trial.refused is None or 0 < len(trial.refused) < 600, (kind, text, trial.refused)
    print(dict(counts))
    assert [killer for killer in killers if killer[0] != -signal.SIGALRM] == []
    assert len(killers) <= sum(counts.values()) / 500
    for kind in ("json_schema", "regex", "grammar"):
        assert min(counts[f"{kind} works"], counts[f"{kind} refused"]) > sum(counts.values()) / 200, counts


async def test_services_serve_or_refuse_each_and_a_bystander_is_unaffected(roster: RosterProcesses) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED + 1)
    cases = [random_constraint(rng) for _ in range(SERVED)]
    serving = [roster.pid("scheduler"), roster.pid("runner"), *roster.children("scheduler")]
    masks = roster.mask_processes()
    async with RosterClient(roster.address) as client:
        solo = await bystander(client)
        outcomes: Counter[str] = Counter()
        beside = 0
        for begin in range(0, len(cases), 20):
            together = [served(client, *case) for case in cases[begin : begin + 20]]
            completion, *some = await asyncio.gather(bystander(client), *together)
            assert completion.choices[0].token_ids == solo.choices[0].token_ids
            outcomes.update(some)
            beside += 1
    print(
        dict(outcomes), beside, "bystanders;", len(set(masks) - set(roster.mask_processes())), "mask processes replaced"
    )
    assert [roster.pid("scheduler"), roster.pid("runner"), *roster.children("scheduler")] == serving
    assert outcomes["refused"] > SERVED / 10 and outcomes["STOP"] + outcomes["LENGTH"] > SERVED / 10


async def bystander(client: RosterClient) -> Completion:
    return await client.generate(
        "beside", raw=True, max_tokens=200, ignore_eos=True, seed=3, temperature=1.0
    ).completion()


async def served(client: RosterClient, kind: str, text: str) -> str:
    """Returns a constraint's outcome: "refused", or the finish reason."""
    request = inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(text="x"))
    request.stop.max_tokens = 12
    setattr(request.constraint, kind, text)
    try:
        completion = await client.send(request, deadline_s=120).completion()
    except InvalidRequestError as error:
        assert [violation.field for violation in error.violations] == [f"constraint.{kind}"], (text, error)
        assert error.message.startswith(f"constraint.{kind}: "), (text, error)
        return "refused"
    finish = completion.choices[0].finish
    assert finish is not None and finish.reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR), text
    assert finish.reason is not FinishReason.ERROR or finish.message, text
    return finish.reason.name
