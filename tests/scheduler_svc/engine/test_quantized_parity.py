"""A quantized model through the whole engine, with everything at once: its tokens are those of the numbers it holds."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.execution.runner import Runner
from scheduler_svc.constrained.process.compiler import grammar_text
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.plan.plan_draft import pack
from tests.support.constraints import allowed_after
from tests.support.in_process import Stack
from tests.support.parity import Parity, Precision
from tests.support.plans import SAMPLE, admission, plan, sampling
from tests.support.tested_backend import CPU, HOST, TESTED, ModelBackend, TestedBackend
from tests.support.tested_device import NEEDS_DEVICE
from tests.support.thoroughness import choice
from tests.support.tiny_models import KERNEL_SIZES, NUM_TOKENS
from tests.support.tiny_quantized import make_tiny_quantized

# As in tests/runner_svc/model/test_quantized.py: a sum's last bit decides where an activation is rounded to.
ROUNDED = Precision(torch.float32, 0.15, 0.3, relative=True, few=3, rate=0.1)
REGEX = "(foo|ba+r)[0-9]{2,4}"
MAX_TOKENS = 14
DEVICES = (CPU, HOST) if TESTED is CPU else (TESTED,)

pytestmark = NEEDS_DEVICE


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(device: TestedBackend, folder: Path) -> ModelBackend:
    blocks = 96 // device.block_size(8)
    return device.load(folder, num_blocks=blocks, block_size=8, num_slots=6, max_step_tokens=64)


def submit_all(stack: Stack, rng: random.Random) -> dict[int, tuple[list[int], bool]]:
    """Submits requests that share prefixes, some of several choices and some constrained; returns prompts by handle."""
    stem, asked = [rng.randrange(256) for _ in range(32)], {}
    stops = {"temperature": 0, "top_p": 1, "repetition_penalty": 1, "stop_ids": pack([IM_END_ID])}
    for index in range(8):
        prompt = stem[: rng.choice([0, 16, 32])] + [rng.randrange(256) for _ in range(rng.randint(1, 9))]
        fields: dict[str, Any] = {"n": 2} if index % 4 == 1 else {}
        if index % 4 == 3:
            fields["grammar"] = grammar_text("regex", REGEX)
        request = stack.submit(prompt, MAX_TOKENS, sampling=plan_pb2.Sampling(**stops), **fields)
        asked[request.handle] = prompt, "grammar" in fields
        for _ in range(rng.randrange(6)):
            stack.turn(rng)
    return asked


@pytest.mark.parametrize(
    ("device", "kind"),
    choice(
        [(device, kind) for device in DEVICES for kind in ("compressed-fp8-token", "awq", "fp8-blocks")],
        in_ci=[(DEVICES[-1], "compressed-fp8-token")],
    ),
    ids=str,
)
def test_everything_at_once(device: TestedBackend, kind: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    sizes = KERNEL_SIZES["llama"] if device.has_kernel_sizes else {}
    folder, model = make_tiny_quantized(kind, "llama", tmp_path, seed, **{**sizes, "num_hidden_layers": 2})
    parity = Parity(model, ROUNDED)
    stack = Stack(depth=3, policy_parameters={"step_tokens": 24})
    backend = load(device, folder)
    session = stack.add_runner(backend)
    stack.step()
    asked = submit_all(stack, rng)
    for _ in range(rng.randrange(10, 40)):
        stack.turn(rng)
    first = stack.engine.pool.schedulers[session]
    stack.runners.kill(session, Loss.LEFT)
    session = stack.add_runner(load(device, folder))
    stack.run(rng)
    stack.assert_clean()
    second = stack.engine.pool.schedulers[session]
    allowed = allowed_after(backend.model, "regex", REGEX, stop_ids=[IM_END_ID])
    for handle, (prompt, is_constrained) in asked.items():
        for stream in stack.requests[handle].streams:
            parity.check_forced(prompt, stream.tokens, allowed if is_constrained else None)
    parity.assert_few_ties()
    assert first.cached_tokens + second.cached_tokens > 0
    assert first.preemptions + second.preemptions > 0
    check_logprobs(backend, model, [rng.randrange(NUM_TOKENS) for _ in range(30)])


def check_logprobs(backend: ModelBackend, model: Any, tokens: list[int]) -> None:
    """Compares log-probabilities of a prompt's tokens from the second on."""
    runner = Runner(backend)
    runner.reset()
    blocks = list(range(1, math.ceil(len(tokens) / backend.block_size) + 1))
    first = admission(0, tokens, blocks, sampling=sampling(prompt_logprobs=0))
    result = runner.execute(1, plan(admissions=[first], extents=[(0, 0, len(tokens), SAMPLE)]))
    found = np.concatenate([np.frombuffer(part.values, np.float32) for part in result.prompt_logprobs])
    with torch.inference_mode():
        scores = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    expected = scores[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].numpy()
    assert np.abs(found - expected).max() < ROUNDED.allowed_error(scores)
