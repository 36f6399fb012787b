"""A model's backend alone: which rows get tokens and logprobs, and that rows don't affect each other.

The tests use the torch backend and, in CI, the CUDA backend's host code; ROSTER_TEST_DEVICE selects another backend.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from roster_protos import plan_pb2
from runner_svc.execution.runner import Runner
from tests.support.tested_backend import TESTED_AND_HOST, ModelBackend, TestedBackend, poison, reference
from tests.support.tested_device import NEEDS_DEVICE
from tests.support.tiny_models import NUM_TOKENS

BLOCK_SIZE = 8

pytestmark = NEEDS_DEVICE


@pytest.fixture(scope="module", params=TESTED_AND_HOST, ids=str)
def device(request: pytest.FixtureRequest) -> TestedBackend:
    return request.param


@pytest.fixture(scope="module")
def folder(device: TestedBackend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return device.make_model("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def backend(device: TestedBackend, folder: Path) -> ModelBackend:
    return device.load(folder, num_blocks=32, block_size=BLOCK_SIZE, num_slots=4, max_step_tokens=128)


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def admission(slot: int, tokens: list[int], blocks: list[int], sampling: plan_pb2.Sampling) -> plan_pb2.Admission:
    return plan_pb2.Admission(
        slot=slot,
        sequence_id=slot + 1,
        tokens=ints(*tokens),
        prompt_len=len(tokens),
        sampling=sampling,
        blocks=ints(*blocks),
    )


def plan(
    extents: list[tuple[int, int, int, bool]], admissions: list[plan_pb2.Admission] | None = None
) -> plan_pb2.Plan:
    slots, starts, counts, samples = zip(*extents, strict=True)
    return plan_pb2.Plan(
        admissions=admissions or [],
        extent_slots=ints(*slots),
        extent_starts=ints(*starts),
        extent_counts=ints(*counts),
        extent_flags=bytes(samples),
    )


def greedy(**fields: int) -> plan_pb2.Sampling:
    return plan_pb2.Sampling(temperature=0.0, top_p=1.0, repetition_penalty=1.0, **fields)


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(NUM_TOKENS) for _ in range(length)]


def reference_logprobs(device: TestedBackend, folder: Path, tokens: list[int]) -> torch.Tensor:
    """Returns float32 [len(tokens), vocab_size], computed by transformers."""
    model = reference(folder, device.tiny)
    with torch.inference_mode():
        logprobs: torch.Tensor = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return logprobs


def test_a_step_that_completes_no_prompt_samples_nothing(backend: ModelBackend) -> None:
    runner = Runner(backend)
    prompt = random_prompt(random.Random(1), 20)
    result = runner.execute(1, plan([(0, 0, 12, False)], [admission(0, prompt, [5, 9, 2], greedy())]))
    assert (list(result.token_counts), result.tokens, list(result.statuses)) == ([0], b"", [0])
    result = runner.execute(2, plan([(0, 12, 8, True)]))
    assert list(result.token_counts) == [1]


def test_prompt_logprobs_equal_transformers_over_chunks(
    backend: ModelBackend, device: TestedBackend, folder: Path
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    prompt = random_prompt(random.Random(seed), 21)
    expected = reference_logprobs(device, folder, prompt)
    error = device.tiny.allowed_error(expected)
    runner = Runner(backend)
    admissions = [admission(0, prompt, [7, 1, 30], greedy(logprobs=2, prompt_logprobs=3))]
    values: dict[int, float] = {}
    for number, (start, count) in enumerate([(0, 1), (1, 13), (14, 7)], 1):
        samples = start + count == len(prompt)
        result = runner.execute(number, plan([(0, start, count, samples)], admissions if number == 1 else []))
        for scored in result.prompt_logprobs:
            chunk = np.frombuffer(scored.values, np.float32).tolist()
            values |= {scored.first_position + index: value for index, value in enumerate(chunk)}
            top = torch.from_numpy(np.frombuffer(scored.top_ids, np.int32).reshape(-1, 3).astype(np.int64))
            places = expected[scored.first_position - 1 : scored.first_position - 1 + len(chunk)]
            torch.testing.assert_close(places.gather(1, top), places.topk(3).values, atol=2 * error, rtol=0)
    assert sorted(values) == list(range(1, len(prompt)))
    for position, value in values.items():
        assert value == pytest.approx(float(expected[position - 1, prompt[position]]), abs=error)
    token = int(np.frombuffer(result.tokens, np.int32)[0])
    sampled = np.frombuffer(result.logprobs[0].values, np.float32)
    assert sampled[0] == pytest.approx(float(expected[-1, token]), abs=error)


def test_rows_without_prompt_logprobs_report_none(backend: ModelBackend) -> None:
    rng = random.Random(3)
    admissions = [
        admission(0, random_prompt(rng, 5), [3], greedy()),
        admission(1, random_prompt(rng, 6), [4], greedy(prompt_logprobs=0)),
    ]
    result = Runner(backend).execute(1, plan([(0, 0, 5, True), (1, 0, 6, True)], admissions))
    assert [(scored.row, scored.first_position) for scored in result.prompt_logprobs] == [(1, 1)]
    assert not result.logprobs


def test_a_row_that_is_not_finite_leaves_its_neighbours_alone(backend: ModelBackend) -> None:
    rng = random.Random(4)
    prompts = [random_prompt(rng, 9) for _ in range(3)]
    admissions = [
        admission(slot, prompt, [2 * slot + 1, 2 * slot + 2], greedy()) for slot, prompt in enumerate(prompts)
    ]
    runner = Runner(backend)
    steps = plan([(slot, 0, 9, True) for slot in range(3)], admissions), plan([(slot, 9, 1, True) for slot in range(3)])
    runner.execute(1, steps[0])
    expected = np.frombuffer(runner.execute(2, steps[1]).tokens, np.int32)
    runner.reset()
    runner.execute(1, steps[0])
    poison(backend.cache.data[:, :, 3, 0])  # a position of the second sequence
    poisoned = runner.execute(2, steps[1])
    assert list(poisoned.statuses) == [0, plan_pb2.ROW_STATUS_NOT_FINITE, 0]
    assert np.frombuffer(poisoned.tokens, np.int32).tolist() == expected[[0, 2]].tolist()


def test_copied_blocks_serve_like_the_original(backend: ModelBackend) -> None:
    prompt = random_prompt(random.Random(5), 12)
    runner = Runner(backend)
    result = runner.execute(1, plan([(0, 0, 12, True)], [admission(0, prompt, [1, 2], greedy())]))
    expected = np.frombuffer(result.tokens, np.int32).tolist()
    copying = plan([(1, 11, 1, True)], [admission(1, prompt, [8, 9], greedy())])
    copying.admissions[0].num_computed = 11
    copying.copy_sources, copying.copy_targets = ints(1, 2), ints(8, 9)
    assert np.frombuffer(runner.execute(2, copying).tokens, np.int32).tolist() == expected


def test_hello_describes_the_backend(backend: ModelBackend, device: TestedBackend) -> None:
    hello = Runner(backend).hello()
    assert hello.device == ("cuda:0" if device.name == "cuda" else "cpu")
    assert (hello.num_slots, hello.block_size, hello.num_blocks) == (4, device.block_size(BLOCK_SIZE), 32)
    assert (hello.model.vocab_size, hello.model.architecture) == (NUM_TOKENS, "LlamaForCausalLM")
    if device.name != "host":
        assert len(hello.model.weights_version) == 32
