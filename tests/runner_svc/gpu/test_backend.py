"""The CUDA backend's logic on the CPU: the torch backend's tokens, plans launched ahead, pool size, failures."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from roster_protos import plan_pb2
from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.decoder.fusions import Activating, Adding, Fusions
from runner_svc.execution.runner import Runner
from runner_svc.gpu.backend import TAIL_WORDS, CudaBackend
from runner_svc.gpu.capture import prepare_decode
from runner_svc.gpu.fusion_choice import FusionChoice
from runner_svc.interface.pool_size import MemoryProfile, OutOfMemory
from tests.support.greedy_driver import RandomDriver
from tests.support.host_backend import host_backend, no_progress
from tests.support.host_device import HostDevice
from tests.support.host_layers import HostGated
from tests.support.plans import AWAIT, SAMPLE, admission, ints, masks, plan, sampling
from tests.support.thoroughness import choice
from tests.support.tiny_models import FAMILIES, IN_CI, NUM_TOKENS, make_tiny_model

BLOCK_SIZE = 8
LIKE_GEMMA3 = {"gemma2", "glm4", "granite", "opt"}
"""Families whose launches differ from those of gemma3, cohere and gpt2 in numbers only."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny")


def cuda_backend(folder: Path, device: HostDevice | None = None, num_blocks: int | None = 48) -> CudaBackend:
    backend = host_backend(
        folder, num_slots=5, block_size=BLOCK_SIZE, max_step_tokens=40, num_blocks=num_blocks, device=device
    )
    backend.cache.data.fill_(torch.nan)
    return backend


def torch_backend(folder: Path) -> TorchBackend:
    return TorchBackend.load(
        str(folder),
        cache_folder=folder / "unused",
        progress=no_progress,
        num_blocks=48,
        block_size=BLOCK_SIZE,
        num_slots=5,
        max_step_tokens=40,
    )


@pytest.mark.parametrize(
    "family", choice(list(FAMILIES), in_ci=[family for family in IN_CI if family not in LIKE_GEMMA3])
)
def test_random_plans_give_the_torch_backends_tokens(family: str, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder = make_tiny_model(family, tmp_path / "tiny")
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 30))] for _ in range(5)]
    device = HostDevice()
    actual = RandomDriver(cuda_backend(folder, device), rng).generate(prompts, 8, 12)
    assert actual == RandomDriver(torch_backend(folder), rng).generate(prompts, 8, 12)
    assert device.replays > 0


@pytest.mark.parametrize(
    ("family", "bucket", "few", "max_skinny", "num_variants"),
    [
        ("llama", 1, 64, 128, 4),
        ("qwen3", 4, 3, 128, 6),
        ("llama", 4, 3, 3, 3),
        ("qwen3", 4, 3, 3, 3),
        ("gemma3", 4, 64, 128, 3),
        ("cohere", 4, 3, 128, 5),
        ("llama-biases", 4, 64, 128, 1),
        ("llama-biases", 4, 3, 128, 2),
        ("qwen3-moe", 4, 64, 128, 2),
        ("mixtral", 4, 64, 3, 1),
        ("gpt-oss", 4, 64, 128, 1),
    ],
)
def test_all_variants_of_a_decode_step_give_the_same_logits(
    family: str,
    bucket: int,
    few: int,
    max_skinny: int,
    num_variants: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`few`: number of rows above which products fuse; `max_skinny`: maximum rows of Roster's products of few rows."""
    monkeypatch.setattr("runner_svc.gpu.steps.MAX_ROWS", max_skinny)
    monkeypatch.setattr("runner_svc.gpu.steps.FEW_ROWS", few)
    backend = cuda_backend(make_tiny_model(family, tmp_path / "tiny"))
    backend.cache.data.normal_()
    steps, slots = backend._steps, backend._slots
    slots.tokens.random_(NUM_TOKENS)
    slots.spread(64, backend.cache)
    prepare_decode(steps, 64, bucket, bucket)
    logits = []
    for variant in steps.decode_variants(lambda: 0, bucket):
        steps.logits.fill_(torch.nan)
        variant.launch()
        logits.append(steps.logits[:bucket].clone())
    assert len(logits) == num_variants
    assert len({tuple(row) for row in logits[0].tolist()}) == bucket  # each row has its own tokens and keys
    for others in logits[1:]:
        torch.testing.assert_close(others, logits[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "has_experts"), [("mixtral", True), ("qwen3", False)])
def test_a_runner_says_whether_its_model_is_a_mixture_of_experts(
    family: str, has_experts: bool, tmp_path: Path
) -> None:
    assert Runner(cuda_backend(make_tiny_model(family, tmp_path / "tiny"))).hello().has_experts is has_experts


@pytest.mark.parametrize(
    ("family", "captured", "fusions"),
    [
        ("llama", True, Fusions()),
        ("mistral", True, Fusions(Adding.PRODUCTS)),
        ("qwen3", False, Fusions(Adding.PRODUCTS, Activating.PRODUCT)),
        ("llama", True, Fusions(Adding.NORMS, Activating.PRODUCT)),
        ("llama-biases", True, Fusions(Adding.PRODUCTS)),
        ("granite", True, Fusions(Adding.PRODUCTS)),
        ("cohere", False, Fusions(Adding.PRODUCTS, Activating.PRODUCT)),
    ],
)
def test_mixed_steps_of_all_kinds_give_the_torch_backends_tokens(
    family: str, captured: bool, fusions: Fusions, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder = make_tiny_model(family, tmp_path / "tiny")
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 30))] for _ in range(5)]
    device = HostDevice(mixed_graphs=captured)
    backend = cuda_backend(folder, device)
    backend._steps.fusions = FusionChoice({1: {fusions: 1.0}})
    before = device.replays
    actual = RandomDriver(backend, rng).generate(prompts, 8, 12)
    assert actual == RandomDriver(torch_backend(folder), rng).generate(prompts, 8, 12)
    assert device.replays > before


def test_plans_are_launched_before_the_last_results_are_known(folder: Path) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(length)] for length in (9, 17)]
    expected = RandomDriver(torch_backend(folder), rng).generate(prompts, 6, 30)
    runner = Runner(cuda_backend(folder))
    assert runner.overlaps
    pending = [
        runner.launch(
            1,
            plan(
                admissions=[admission(0, prompts[0], [3, 9]), admission(4, prompts[1], [5, 1, 7])],
                extents=[(0, 0, 9, SAMPLE), (4, 0, 17, SAMPLE)],
            ),
        )
    ]
    tokens: list[list[int]] = [[], []]
    for number in range(2, 7):  # always two in flight
        step = number - 2
        pending.append(runner.launch(number, plan(extents=[(4, 17 + step, 1, SAMPLE), (0, 9 + step, 1, SAMPLE)])))
        result = ints(pending.pop(0).wait().tokens)
        order = (0, 1) if number == 2 else (1, 0)
        for sequence, token in zip(order, result, strict=True):
            tokens[sequence].append(token)
    last = ints(pending.pop(0).wait().tokens)
    assert [tokens[1] + last[:1], tokens[0] + last[1:]] == [expected[1], expected[0]]
    resident = {state.slot: ints(state.tokens) for state in runner.snapshot().sequences}
    assert resident == {0: prompts[0] + expected[0], 4: prompts[1] + expected[1]}


def test_a_failed_sequence_also_fails_in_the_plan_launched_after_it(folder: Path) -> None:
    backend = cuda_backend(folder)
    runner = Runner(backend)
    prompts = [[1, 2, 3], [4, 5, 6]]
    runner.execute(
        1,
        plan(
            admissions=[admission(slot, prompt, [slot + 1]) for slot, prompt in enumerate(prompts)],
            extents=[(0, 0, 3, SAMPLE), (1, 0, 3, SAMPLE)],
        ),
    )
    backend.cache.data[:, :, 1, 0] = torch.nan  # a position of slot 0
    launched = [
        runner.launch(2, plan(extents=[(0, 3, 1, SAMPLE), (1, 3, 1, SAMPLE)])),
        runner.launch(3, plan(extents=[(0, 4, 1, SAMPLE), (1, 4, 1, SAMPLE)])),
    ]
    results = [pending.wait() for pending in launched]
    bad, failed = plan_pb2.ROW_STATUS_NOT_FINITE, plan_pb2.ROW_STATUS_FAILED
    assert [list(result.statuses) for result in results] == [[bad, 0], [failed, 0]]
    assert [list(result.token_counts) for result in results] == [[0, 1], [0, 1]]
    resident = [state.tokens for state in runner.snapshot().sequences]
    assert [len(ints(tokens)) for tokens in resident] == [4, 6]


def test_a_row_that_waits_fails_with_its_sequence(folder: Path) -> None:
    """Its plan was launched before the failure was known; the mask arrives after it."""
    backend = cuda_backend(folder)
    runner = Runner(backend)
    begin = plan(admissions=[admission(0, [1, 2, 3], [1])], extents=[(0, 0, 3, SAMPLE)])
    runner.execute(1, begin)
    backend.cache.data[:, :, 1, 0] = torch.nan
    launched = [runner.launch(2, plan(extents=[(0, 3, 1, SAMPLE)])), runner.launch(3, plan(extents=[(0, 4, 1, AWAIT)]))]
    assert list(launched[0].wait().statuses) == [plan_pb2.ROW_STATUS_NOT_FINITE]
    launched[1].mask(masks(backend.model.vocab_size, {0: [7]}))
    result = launched[1].wait()
    assert (list(result.statuses), result.tokens) == ([plan_pb2.ROW_STATUS_FAILED], b"")
    (resident,) = runner.snapshot().sequences
    assert len(ints(resident.tokens)) == 4


def test_a_late_result_leaves_the_next_sequence_of_its_slot_alone(folder: Path) -> None:
    runner = Runner(cuda_backend(folder))
    first = admission(0, [1, 2, 3], [1])
    runner.execute(1, plan(admissions=[first], extents=[(0, 0, 3, SAMPLE)]))
    late = runner.launch(2, plan(extents=[(0, 3, 1, SAMPLE)]))
    prompt = [9, 8, 7, 6, 5, 4]
    extents = [(0, 0, 6, SAMPLE)]
    second = runner.launch(3, plan(releases=[0], admissions=[admission(0, prompt, [9])], extents=extents))
    assert list(late.wait().token_counts) == [1]
    tokens = ints(second.wait().tokens)
    assert ints(runner.snapshot().sequences[0].tokens) == prompt + tokens


@pytest.mark.parametrize(("family", "prepared"), [("llama", 40), ("llama-biases", 0)])
def test_chosen_own_products_are_compiled_for_the_largest_step(family: str, prepared: int, tmp_path: Path) -> None:
    """All variants are equally fast here, so more fusions are chosen; with biases there is no own gate-up product."""
    backend = cuda_backend(make_tiny_model(family, tmp_path / "tiny"))
    gated = backend._decoder._launchers.gated
    assert isinstance(gated, HostGated)
    assert gated.prepared == prepared


@pytest.mark.parametrize("adding", Adding)
def test_sampled_tokens_and_logprobs_are_those_of_the_torch_backend(folder: Path, adding: Adding) -> None:
    results = []
    ours_on_device = cuda_backend(folder)
    ours_on_device._steps.fusions = FusionChoice({1: {Fusions(adding): 1.0}})
    for backend in (ours_on_device, torch_backend(folder)):
        runner = Runner(backend)
        asks = sampling(temperature=0.9, logprobs=2, prompt_logprobs=1)
        admissions = [admission(2, [7, 8, 9, 10, 11], [4], seed=77, sampling=asks), admission(1, [3, 4], [6], seed=5)]
        runner.execute(1, plan(admissions=admissions, extents=[(1, 0, 1, 0), (2, 0, 2, 0)]))
        results.append(runner.execute(2, plan(extents=[(1, 1, 1, SAMPLE), (2, 2, 3, SAMPLE)])))
    ours, expected = results
    assert ours.tokens == expected.tokens
    for mine, wanted in zip(
        (*ours.logprobs, *ours.prompt_logprobs), (*expected.logprobs, *expected.prompt_logprobs), strict=True
    ):
        assert (mine.row, mine.first_position, mine.top, mine.top_ids) == (
            wanted.row,
            wanted.first_position,
            wanted.top,
            wanted.top_ids,
        )
        np.testing.assert_allclose(
            np.frombuffer(mine.values, np.float32), np.frombuffer(wanted.values, np.float32), atol=1e-4
        )


def test_the_pool_takes_what_the_largest_step_leaves(folder: Path) -> None:
    block_bytes = 3 * 2 * BLOCK_SIZE * 2 * 16 * 4
    needed = 1 << 20
    profile = MemoryProfile(total=2 << 30, peak=needed, other=needed)
    backend = cuda_backend(folder, HostDevice(profile), num_blocks=None)
    assert backend.num_blocks == (int((2 << 30) * 0.9) - 2 * needed - (512 << 20)) // block_bytes
    with pytest.raises(OutOfMemory, match="no GPU memory is left for KV"):
        cuda_backend(folder, HostDevice(MemoryProfile(total=1 << 29, peak=needed, other=needed)), num_blocks=None)


def test_changes_beyond_the_buffer_are_copied_separately(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TAIL_WORDS > 1000
    prompt = [random.Random(1).randrange(NUM_TOKENS) for _ in range(30)]
    step = plan(admissions=[admission(3, prompt, [2, 3, 4, 5])], extents=[(3, 0, 30, SAMPLE)])
    expected = Runner(cuda_backend(folder)).execute(1, step).tokens
    monkeypatch.setattr("runner_svc.gpu.backend.TAIL_WORDS", 16)
    assert Runner(cuda_backend(folder)).execute(1, step).tokens == expected


def test_plans_without_rows_also_change_the_slots(folder: Path) -> None:
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    whole = plan(admissions=[admission(0, prompt, [2, 3])], extents=[(0, 0, 9, SAMPLE)])
    expected = Runner(cuda_backend(folder)).execute(1, whole).tokens
    runner = Runner(cuda_backend(folder))
    runner.execute(1, plan(admissions=[admission(0, prompt, [2])]))
    runner.execute(2, plan(appends=[(0, 1, 3)]))
    assert runner.execute(3, plan(extents=[(0, 0, 9, SAMPLE)])).tokens == expected
