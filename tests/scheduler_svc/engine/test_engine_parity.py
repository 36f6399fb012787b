"""Greedy output equals transformers' in float32 through the whole engine: random arrivals, chunks from one position to
the whole prompt, every depth and block size, and a pool so small that preemption is the rule. Of a deterministic
backend it equals that of its own logits of a text alone, without any near tie.

ROSTER_TEST_DEVICE selects the backend; one that overlaps has plans launched ahead, as many as the depth allows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.catalog.source import model_folder
from runner_svc.hub.packaged import DEFAULT_MODEL
from runner_svc.interface.backend import OverlappingBackend
from runner_svc.model.errors import ModelNotFound
from runner_svc.settings.runner_settings import default_cache_folder
from scheduler_svc.constrained.process.compiler import grammar_text
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.plan.plan_draft import pack
from tests.support.constraints import allowed_after
from tests.support.drafters import let_draft
from tests.support.exact_parity import ExactParity
from tests.support.in_process import Stack, Submitted
from tests.support.parity import Parity, Precision
from tests.support.ranked_backend import RankedBackend
from tests.support.scripted_drafts import RandomDrafts
from tests.support.tested_backend import (
    CPU,
    DETERMINISTIC,
    TESTED,
    TESTED_AND_HOST,
    ModelBackend,
    TestedBackend,
    parity_of,
)
from tests.support.tested_device import NEEDS_DEVICE
from tests.support.thoroughness import FULL, choice, count
from tests.support.tiny_models import NUM_TOKENS

FAMILIES_IN_CI = ("llama-dynamic", "qwen3-moe")
"""In CI, on the CPU, beside one of a deterministic backend. `tests/runner_svc/model/test_parity.py` has each without an
engine."""
FAMILIES = (
    *FAMILIES_IN_CI,
    "mistral",
    "gemma3",
    "llama-llama3",
    "qwen2",
    "qwen3",
    "gemma2",
    "granite",
    "olmo2",
    "glm4",
    "cohere",
    "cohere2",
    "gpt2",
    "opt",
    "mixtral",
    "gpt-oss",
    "llama-longrope",
    "glm4-moe",
    "dots1",
    "ernie4-5-moe",
)
ON_HOST = ("llama-dynamic", "qwen3")
"""In CI: one model whose RoPE depends on the length, one that normalizes queries and keys."""
MAX_TOKENS = 40
POOL_TOKENS = 64
REGEX = "(foo|ba+r)[0-9]{2,5}"

pytestmark = NEEDS_DEVICE
IN_CI = [device for device in TESTED_AND_HOST if device.name != "transformers"]
"""The sweep in tests/runner_svc/transformers_decoder does much the same with that one."""
DEVICES = [*TESTED_AND_HOST, DETERMINISTIC] if TESTED is CPU else TESTED_AND_HOST
devices = pytest.mark.parametrize("device", choice(DEVICES, in_ci=IN_CI), ids=str)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@dataclass(frozen=True)
class Setup:
    """Serving parameters of a test."""

    depth: int
    block_size: int
    step_tokens: int
    num_requests: int
    max_tokens: int = MAX_TOKENS


def load(
    device: TestedBackend, folder: Path, pool_tokens: int, block_size: int, precision: Precision | None = None
) -> ModelBackend:
    return device.load(
        folder,
        num_blocks=pool_tokens // device.block_size(block_size),
        block_size=block_size,
        num_slots=6,
        max_step_tokens=128,
        precision=precision,
    )


def draft(stack: Stack, backend: ModelBackend, rng: random.Random) -> None:
    """Lets rows draft random numbers of tokens, if the backend can; in CI in a part of the runs."""
    if isinstance(backend, TorchBackend | RankedBackend) and rng.random() < (1 if FULL else 0.2):
        let_draft(backend, rng)
        stack.drafts = RandomDrafts(rng)


def serve(backend: ModelBackend, rng: random.Random, setup: Setup) -> tuple[Stack, int]:
    """Serves all requests over this backend's pool; returns the stack and its number of preemptions."""
    stack = Stack(depth=setup.depth, policy_parameters={"step_tokens": setup.step_tokens})
    draft(stack, backend, rng)
    session = stack.add_runner(backend)
    for _ in range(setup.num_requests):
        prompt = [rng.randrange(backend.model.vocab_size) for _ in range(rng.randint(1, 24))]
        stack.submit(prompt, setup.max_tokens)
        for _ in range(rng.randrange(6)):
            stack.turn(rng)
    stack.run(rng)
    stack.assert_clean()
    return stack, stack.engine.pool.schedulers[session].preemptions


def prompt_of(request: Submitted) -> list[int]:
    return np.frombuffer(request.submit.prompt, "<i4").tolist()


def compare(stack: Stack, parity: Parity | ExactParity, max_tokens: int) -> None:
    requests = list(stack.requests.values())
    streams = [request.streams[0].tokens for request in requests]
    parity.check([prompt_of(request) for request in requests], streams, max_tokens)


EVERYWHERE = [(family, device) for family in FAMILIES for device in DEVICES]


@pytest.mark.parametrize(
    ("family", "device"),
    choice(
        EVERYWHERE,
        in_ci=[
            (family, device)
            for family in FAMILIES
            for device in IN_CI
            if family in (FAMILIES_IN_CI if device.share == 1 else ON_HOST)
        ]
        + [pair for pair in EVERYWHERE if pair == ("gemma3", DETERMINISTIC)],
    ),
    ids=str,
)
def test_engine_and_runner_give_the_tokens_of_generate(
    family: str, device: TestedBackend, tmp_path: Path, rng: random.Random
) -> None:
    folder = device.make_model(family, tmp_path / family, rng.randrange(1000))
    parity = parity_of(device, folder)
    num_requests, preemptions = device.count(16, in_ci=4), 0
    for depth, block_size, step_tokens in ((1, 16, 6), (2, 8, 128), (3, 32, 17)):
        backend = load(device, folder, POOL_TOKENS, block_size)
        stack, preempted = serve(backend, rng, Setup(depth, block_size, step_tokens, num_requests))
        preemptions += preempted
        compare(stack, parity, MAX_TOKENS)
        assert stack.runners.most_launched == (depth if isinstance(backend, OverlappingBackend) else 0)
    print(f"{preemptions} preemptions of {3 * num_requests} streams")
    assert preemptions >= num_requests
    parity.assert_few_ties()


@devices
@pytest.mark.parametrize("family", choice(["llama-dynamic", "llama-longrope", "qwen2"], in_ci=["llama-longrope"]))
def test_shared_prefixes_give_the_tokens_of_generate(
    family: str, device: TestedBackend, tmp_path: Path, rng: random.Random
) -> None:
    """Two were trained to 32 positions: shorter prompts share blocks, longer ones must not."""
    folder = device.make_model(family, tmp_path / family, rng.randrange(1000))
    parity = parity_of(device, folder)
    stem = [rng.randrange(NUM_TOKENS) for _ in range(40)]
    lengths = [rng.randint(*rng.choice([(1, 40), (17, 28)])) for _ in range(24)]  # the kernels' block size, within 32
    prompts = [stem[:length] + [rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 4))] for length in lengths]
    cached = []
    for sharing in (True, False):
        stack = Stack(prefix_sharing=sharing, policy_parameters={"step_tokens": 20})
        backend = load(device, folder, 40 * device.block_size(4), block_size=4)
        draft(stack, backend, rng)
        session = stack.add_runner(backend)
        for prompt in prompts:
            stack.submit(prompt, 8)
            for _ in range(rng.randrange(4)):
                stack.turn(rng)
        stack.run(rng)
        compare(stack, parity, 8)
        cached.append(stack.engine.pool.schedulers[session].cached_tokens)
    print(f"{cached[0]} prompt tokens from the cache")
    assert cached[0] > 20 and cached[1] == 0
    parity.assert_few_ties()


@devices
def test_constrained_rows_take_the_likeliest_of_what_is_allowed(
    device: TestedBackend, tmp_path: Path, rng: random.Random
) -> None:
    """They wait for masks among rows without any, and are preempted like them."""
    folder = device.make_model("qwen3", tmp_path / "tiny", rng.randrange(1000))
    parity = parity_of(device, folder)
    stops = {"temperature": 0, "top_p": 1, "repetition_penalty": 1, "stop_ids": pack([IM_END_ID])}
    stack = Stack(depth=3, policy_parameters={"step_tokens": 24})
    backend = load(device, folder, 3 * POOL_TOKENS // 2, 16)
    draft(stack, backend, rng)
    session = stack.add_runner(backend)
    stack.step()
    for index in range(device.count(24, in_ci=12)):
        grammar = {"grammar": grammar_text("regex", REGEX)} if index % 2 else {}
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 24))]
        stack.submit(prompt, MAX_TOKENS, sampling=plan_pb2.Sampling(**stops), **grammar)
        for _ in range(rng.randrange(6)):
            stack.turn(rng)
    stack.run(rng)
    stack.assert_clean()
    allowed = allowed_after(backend.model, "regex", REGEX, stop_ids=[IM_END_ID])
    for request in stack.requests.values():
        tokens = request.streams[0].tokens
        assert len(tokens) == MAX_TOKENS or tokens[-1] == IM_END_ID
        parity.check_forced(prompt_of(request), tokens, allowed if request.submit.grammar else None)
    print(f"{stack.engine.pool.schedulers[session].preemptions} preemptions")
    parity.assert_few_ties()


@devices
def test_streams_go_on_when_schedulers_restart_and_runners_are_lost(
    device: TestedBackend, tmp_path: Path, rng: random.Random
) -> None:
    folder = device.make_model("llama", tmp_path / "tiny", rng.randrange(1000))
    parity = parity_of(device, folder)
    stack = Stack(depth=3, policy_parameters={"step_tokens": 24})
    backends = [load(device, folder, 2 * POOL_TOKENS, 16) for _ in range(2)]
    draft(stack, backends[0], rng)
    stack.add_runner(backends[0])
    for _ in range(device.count(24, in_ci=12)):
        stack.submit([rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 24))], MAX_TOKENS)
    for trouble in ("scheduler", "runner", "scheduler"):
        for _ in range(rng.randrange(20, 100)):
            stack.turn(rng)
        if trouble == "scheduler":
            stack.restart_scheduler()
        else:
            stack.runners.kill(next(iter(stack.runners.runners)), Loss.LEFT)
            stack.add_runner(backends[1])  # which has no drafter
    stack.run(rng)
    compare(stack, parity, MAX_TOKENS)
    stack.assert_clean()
    parity.assert_few_ties()


@pytest.mark.parametrize(
    "device", choice([TESTED, DETERMINISTIC] if TESTED is CPU else [TESTED], in_ci=[TESTED]), ids=str
)
def test_smollm2_through_the_engine_gives_the_tokens_of_generate(device: TestedBackend, rng: random.Random) -> None:
    try:
        folder = model_folder(DEFAULT_MODEL, default_cache_folder(), lambda what, share: None)
    except ModelNotFound as error:
        pytest.skip(str(error))
    parity = parity_of(device, folder, device.smollm2)
    setup = Setup(2, 16, 16, num_requests=count(5, in_ci=4), max_tokens=count(20, in_ci=14))
    backend = load(device, folder, POOL_TOKENS, setup.block_size, device.smollm2)
    stack, preemptions = serve(backend, rng, setup)
    compare(stack, parity, setup.max_tokens)
    print(f"{preemptions} preemptions of {setup.num_requests} streams")
    parity.assert_few_ties()
