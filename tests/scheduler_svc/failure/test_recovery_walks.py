"""Long random walks with the rules of the recovery machine: no search, no shrinking, and several times the rate.

A walk is determined by its seed: `ROSTER_TEST_FIRST_WALK=SEED ROSTER_TEST_WALKS=1` repeats one, and

    ROSTER_TEST_WALKS=20000 pytest --timeout=0 tests/scheduler_svc/failure/test_recovery_walks.py

runs many; with `ROSTER_TEST_DRAFTING=1`, runners draft in all of them, with `ROSTER_TEST_TIERS=1` some have host pools
in all, and with `ROSTER_TEST_MOVING=1`, sequences move between runners in all. The invariants are those of the machine.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import structlog

from runner_svc.batch.batch_state import BatchState
from scheduler_svc.policy import VictimChoice, available_policies
from tests.scheduler_svc.engine.test_engine_machine import CONTEXTS, NUM_BLOCKS, STEM
from tests.scheduler_svc.failure.test_recovery_machine import CRASHES, RecoveryMachine
from tests.support.constraints import CONSTRAINTS
from tests.support.thoroughness import count

NUM_WALKS = int(os.environ.get("ROSTER_TEST_WALKS", count(25, in_ci=9)))
FIRST_WALK = int(os.environ.get("ROSTER_TEST_FIRST_WALK", "1"))

POLICIES = available_policies()
DRAFTING = float(os.environ.get("ROSTER_TEST_DRAFTING", "0.7"))
"""Share of the walks in which runners draft."""
TIERS = float(os.environ.get("ROSTER_TEST_TIERS", "0.5"))
"""Share of the walks in which some runners have a host pool."""
MOVING = float(os.environ.get("ROSTER_TEST_MOVING", "0.6"))
"""Share of the walks in which runners have roles, and sequences move between them."""


def _request(rng: random.Random) -> dict[str, Any]:
    length = rng.randint(1, 30)
    prompt = [rng.randrange(4) for _ in range(length)]
    if rng.random() < 0.7:
        prompt = [*rng.choice((STEM, STEM, *CONTEXTS))[: length - 1], rng.randrange(4)]
    all_at_once = rng.random() < 0.1  # structured, scored, and several choices
    return {
        "prompt": prompt,
        "max_tokens": rng.randint(1, 26),
        "n": 2 if all_at_once else rng.choice([1, 1, 2]),
        "temperature": rng.choice([0.0, 1.0]),
        "timeout_ms": rng.choice([None, None, None, rng.randint(1, 3000)]),
        "keep_ms": rng.choice([0, 0, 1500]),
        "seed": rng.randrange(10),
        "cache_salt": rng.choice(["", "", "salt"]),
        "tenant": rng.choice(["", "a"]),
        "num_received": rng.choice([0, 0, 0, 1, 4]),
        "priority": rng.choice([0, 0, 5, -5]),
        "logprobs": 1 if all_at_once else rng.choice([None, None, None, 1]),
        "prompt_logprobs": 1 if all_at_once else rng.choice([None, None, None, 0, 2]),
        "constraint": rng.choice(CONSTRAINTS if all_at_once else [None] * 8 + CONSTRAINTS),
        "min_tokens": rng.choice([0, 0, 3, 8]),
        "speculates": rng.random() < 0.8,
    }


def _with_rng(rng: random.Random) -> dict[str, Any]:
    return {"rng": rng}


def _nothing(rng: random.Random) -> dict[str, Any]:
    return {}


RULES: dict[str, tuple[int, Callable[[random.Random], dict[str, Any]]]] = {
    "submit": (12, _request),
    "step": (8, _nothing),
    "execute": (8, _with_rng),
    "deliver": (8, _with_rng),
    "turns": (14, _with_rng),
    "cancel": (2, lambda rng: {"rng": rng, "how": rng.choice(["cancel", "disconnect"])}),
    "swap_policy": (2, lambda rng: {"policy": rng.choice(POLICIES)}),
    "contexts_come_back": (5, lambda rng: {"rng": rng, "stems": rng.randint(2, 4), "rounds": rng.randint(2, 3)}),
    "slow_masks": (3, lambda rng: {"turns": rng.choice([0, 1, 2, 4, 6])}),
    "overtaken": (10, lambda rng: {"rng": rng, "turns": rng.randint(1, 6)}),
    "time_passes": (2, lambda rng: {"seconds": rng.uniform(0.1, 2)}),
    "kill": (2, _with_rng),
    "crash": (1, lambda rng: {"rng": rng, "loss": rng.choice(CRASHES)}),
    "fall_ill": (2, lambda rng: {"rng": rng, "plans": rng.randint(1, 5)}),
    "restart": (2, _nothing),
    "restart_without_a_runner": (4, _with_rng),
    "network_cut": (3, _with_rng),
    "leave": (1, _with_rng),
    "truncated": (1, lambda rng: {"rng": rng, "column": rng.choice(["tokens", "statuses", "token_counts"])}),
    "doubled": (2, _with_rng),
    "mask_process_dies": (2, lambda rng: {"role": rng.choice(["grammars", "masks"]), "after": rng.randrange(6)}),
    "wakes_after_its_successor_took_over": (2, lambda rng: {"rng": rng, "sees_results": rng.random() < 0.5}),
}
"""Weight of each rule, and the function that draws its arguments."""


def _possible(machine: RecoveryMachine, name: str) -> bool:
    """Returns whether the rule's preconditions are met."""
    if name == "cancel":
        return bool(machine.stack.requests)
    if name in ("truncated", "doubled"):
        return any(machine.stack.runners.results.values())
    free = (
        "submit",
        "contexts_come_back",
        "step",
        "swap_policy",
        "slow_masks",
        "overtaken",
        "time_passes",
        "restart",
        "mask_process_dies",
    )
    return name in free or bool(machine.stack.runners.runners)


def walk(seed: int) -> None:
    """Runs one walk of 20 to 120 rules, and finishes all requests that it started."""
    rng = random.Random(seed)
    machine = RecoveryMachine()
    machine.start(
        depth=rng.randint(1, 3),
        policy=rng.choice(POLICIES),
        sharing=rng.random() < 2 / 3,
        isolated=rng.random() < 0.5,
        runners=rng.randint(1, 3),
        running=rng.choice([None, 1]),
        victim=rng.choice(list(VictimChoice)),
        timed=rng.random() < 0.5,
        drafts=random.Random(seed) if rng.random() < DRAFTING else None,
        late=random.Random(seed) if rng.random() < 0.5 else None,
        forces=rng.random() < 0.75,
        host=random.Random(seed) if rng.random() < TIERS else None,
        moves=random.Random(seed) if rng.random() < MOVING else None,
        ranks=rng.choice([1, 1, 2]),
        scripted=rng.random() < 0.75,
        fails=rng.random() < 1 / 3,
        num_blocks=rng.choice([NUM_BLOCKS, 4 * NUM_BLOCKS]),
    )
    names, weights = list(RULES), [weight for weight, _ in RULES.values()]
    for name in rng.choices(names, weights, k=rng.randint(20, 120)):
        if _possible(machine, name):
            getattr(machine, name)(**RULES[name][1](rng))
    machine.teardown()


def test_walks() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # for less output
    for seed in range(FIRST_WALK, FIRST_WALK + NUM_WALKS):
        try:
            walk(seed)
        except Exception as error:
            raise AssertionError(f"walk {seed}: {error!r}") from error


def test_walks_find_a_late_token_in_anothers_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of rows before sampling, the usual number of walks finds a wrong answer."""
    monkeypatch.setattr(BatchState, "outlived", lambda self, applied, rows: np.zeros(len(rows), np.bool_))
    with pytest.raises(AssertionError, match=r"walk \d+: AssertionError"):
        test_walks()
