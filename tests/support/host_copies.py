"""A backend's steps beside copies of its blocks, and a prefix that goes to the host pool and back: same tokens."""

from __future__ import annotations

import random
from collections import deque

import torch

from runner_svc.execution.plans_in_flight import LaunchedPlan
from runner_svc.execution.runner import Runner
from runner_svc.gpu.backend import CudaBackend
from tests.support.host_backend import no_progress
from tests.support.host_world import tag
from tests.support.plans import SAMPLE, admission, ints, plan
from tests.support.tiny_models import NUM_TOKENS

PROMPT_BLOCKS = 5
_STEPS, _ROUND, _BLOCKS = 60, 6, 11


class Steps:
    """A runner whose plans know their number, and may be launched ahead."""

    def __init__(self, backend: CudaBackend, num_host_blocks: int) -> None:
        self.copier = backend.host_copier(num_host_blocks, no_progress)
        self.runner = Runner(backend, copier=self.copier)
        self.runner.reset(b"secret")
        self.offloads_done: list[int] = []
        self.loads_done: list[int] = []
        self._flights: deque[LaunchedPlan] = deque()

    def launch(self, **columns: object) -> None:
        one = plan(**columns)  # type: ignore[arg-type]
        self._flights.append(self.runner.launch(self.runner.last_plan + 1, one))

    def take(self) -> list[int]:
        """Waits for the oldest plan, and lets copies go on meanwhile; returns its tokens."""
        flight = self._flights.popleft()
        while not flight.done():
            self.runner.look_at_copies()
        self.runner.look_at_copies()
        result = flight.wait()
        self.offloads_done += ints(result.offloads_done)
        self.loads_done += ints(result.loads_done)
        return ints(result.tokens)

    def execute(self, **columns: object) -> list[int]:
        self.launch(**columns)
        return self.take()


def decoded(steps: Steps, rng: random.Random, copies: bool) -> list[list[int]]:
    """Decodes three sequences with a plan always ahead. With `copies`, every few steps one offloads blocks, in two
    tickets, and another loads some that are in the host pool."""
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(length)] for length in (70, 33, 5)]
    steps.launch(
        admissions=[admission(slot, prompts[slot], range(1 + 10 * slot, 11 + 10 * slot)) for slot in range(3)],
        extents=[(slot, 0, len(prompts[slot]), SAMPLE) for slot in range(3)],
    )
    tokens: list[list[int]] = [[], [], []]
    loads = 0
    for step in range(_STEPS):
        columns: dict[str, object] = {"extents": [(slot, len(prompts[slot]) + step, 1, SAMPLE) for slot in range(3)]}
        turn, place = divmod(step, _ROUND)
        hosted = [1 + turn * _BLOCKS + index for index in range(_BLOCKS)]
        if copies and place == 1:
            some = [(host + 60, host, tag(turn)) for host in hosted]
            columns["offloads"] = [some[:7], some[7:]]
        if (
            copies
            and place == _ROUND - 1
            and len(steps.offloads_done) == 2 + 2 * turn
            and len(steps.loads_done) == loads
        ):
            columns["loads"] = [[(host, 40 + index) for index, host in enumerate(hosted)]]
            loads += 1
        steps.launch(**columns)
        for slot, token in enumerate(steps.take()):
            tokens[slot].append(token)
    for slot, token in enumerate(steps.take()):
        tokens[slot].append(token)
    return tokens


def check_steps(backend: CudaBackend, rng: random.Random) -> None:
    """Checks that steps draw the same tokens while blocks that no sequence has are copied."""
    seed = rng.randrange(2**32)
    alone = decoded(Steps(backend, 120), random.Random(seed), copies=False)
    copying = Steps(backend, 120)
    assert decoded(copying, random.Random(seed), copies=True) == alone
    copying.runner.finish_copies()
    copying.execute()
    assert copying.offloads_done == list(range(1, 2 * _STEPS // _ROUND + 1))
    assert copying.loads_done, "no ticket was done in time"


def check_prefix(backend: CudaBackend, rng: random.Random, poison: int) -> None:
    """Checks that a prefix decodes as before once it was offloaded, overwritten by `poison` bytes, and loaded."""
    steps, size = Steps(backend, 20), backend.block_size
    prompt = [rng.randrange(NUM_TOKENS) for _ in range(PROMPT_BLOCKS * size + 3)]
    first, full = list(range(1, PROMPT_BLOCKS + 3)), PROMPT_BLOCKS * size
    prefix = first[:PROMPT_BLOCKS]
    steps.execute(admissions=[admission(0, prompt, first)], extents=[(0, 0, len(prompt), SAMPLE)])
    kept = backend.cache.data.view(torch.uint8)[:, :, prefix].clone()
    steps.execute(releases=[0])

    def continued(blocks: list[int]) -> list[int]:
        """Returns tokens after the prompt, of which `blocks` have the prefix."""
        admitted = admission(1, prompt, [*blocks, 60, 61], num_computed=full)
        tokens = steps.execute(admissions=[admitted], extents=[(1, full, len(prompt) - full, SAMPLE)])
        for step in range(9):
            tokens += steps.execute(extents=[(1, len(prompt) + step, 1, SAMPLE)])
        steps.execute(releases=[1])
        return tokens

    alone = continued(prefix)
    steps.execute(offloads=[[(block, 20 - block, tag(block)) for block in prefix]])
    while not steps.offloads_done:
        steps.execute()
    backend.cache.data.view(torch.uint8)[:, :, first] = poison
    backend._device.synchronize()
    other = [41, 47, 43, 50, 40]
    steps.execute(loads=[[(20 - block, target) for block, target in zip(prefix, other, strict=True)]])
    while not steps.loads_done:
        steps.execute()
    assert torch.equal(backend.cache.data.view(torch.uint8)[:, :, other], kept)
    assert continued(other) == alone
    assert steps.copier.block_bytes == kept[:, :, 0].numel()
