"""The GPU backend that drafts, on the CPU: streams equal those without drafts, whatever drafts and whatever happens."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from roster_protos import plan_pb2
from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.execution.runner import Runner
from runner_svc.gpu.backend import CudaBackend
from runner_svc.gpu.drafts import draft_options
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.profiling_batch import batch_of
from runner_svc.interface.step import StepBatch
from tests.support.drafters import Prophet
from tests.support.host_backend import host_backend
from tests.support.host_device import HostDevice
from tests.support.host_drafts import HostDrafter
from tests.support.model_drafting import ModelDraftingDriver, mixed_drafts
from tests.support.plans import AWAIT, SAMPLE, admission, ints, masks, plan, sampling
from tests.support.thoroughness import choice, count
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny")


def backend(
    folder: Path, drafts: DraftOptions | None = None, max_step_tokens: int = 160, device: HostDevice | None = None
) -> CudaBackend:
    made = host_backend(
        folder,
        num_slots=5,
        block_size=BLOCK_SIZE,
        max_step_tokens=max_step_tokens,
        num_blocks=60,
        drafts=drafts,
        device=device,
    )
    made.cache.data.fill_(torch.nan)  # tails, and what no step has written
    return made


def poison(drafting: CudaBackend, tokens: set[int]) -> None:
    """Gives the tokens embeddings that are not finite: so are the logits after them, and the keys and values."""
    decoder = drafting._decoder
    assert isinstance(decoder, CudaDecoder)
    decoder.embeddings = decoder.embeddings.clone()
    decoder.embeddings[sorted(tokens)] = torch.nan


@pytest.mark.parametrize("run", range(count(40, in_ci=1)))
def test_streams_equal_those_without_drafts(folder: Path, run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong drafts are often tokens with which the pass is not finite; that decides nothing."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    monkeypatch.setattr(draft_options, "MOST_SAMPLED", dice.choice([5, 12, 1024]))
    prophet = Prophet(dice, NUM_TOKENS, wrong=dice.choice([0.0, 0.3]))
    device = HostDevice(mixed_graphs=dice.random() < 0.5)
    drafting = backend(folder, mixed_drafts(dice, prophet, dice.randint(2, 7)), device=device)
    driver = ModelDraftingDriver(drafting, backend(folder), prophet, dice, requests=count(6, in_ci=4))
    poison(drafting, set(range(NUM_TOKENS)).difference(*prophet.texts))
    driver.run()
    if len(drafting._steps.logits) > 5:  # with less, no row of five has room for a draft
        assert driver.drafted > 1, "hardly any draft was tried"
    assert device.replays > 0


def opened(folder: Path, drafts: DraftOptions, prompt: list[int], blocks: list[int]) -> tuple[Runner, CudaBackend]:
    """Returns a runner whose slot 0 has computed all of a prompt but its last token."""
    drafting = backend(folder, drafts)
    runner = Runner(drafting)
    asked = sampling(logprobs=0)
    first = admission(0, prompt, blocks, sampling=asked)
    runner.execute(1, plan(admissions=[first], extents=[(0, 0, len(prompt) - 1, 0)]))
    return runner, drafting


def guesses(tokens: list[int], max_drafts: int = 7) -> DraftOptions:
    """Returns a drafter that knows one text."""
    prophet = Prophet(random.Random(1), NUM_TOKENS, wrong=0.0)
    prophet.texts = [tokens]
    return DraftOptions("told", max_drafts, lambda _, slots: HostDrafter(prophet, slots.tokens, slots.counters))


PROMPT = [7, 8, 9, 10, 11, 12]


def alone(folder: Path, prompt: list[int] = PROMPT, num_tokens: int = 12) -> list[int]:
    """Returns the greedy tokens after a prompt."""
    runner, tokens = Runner(backend(folder)), list(prompt)
    begin = [admission(0, prompt, range(40, 46))]
    while len(tokens) < len(prompt) + num_tokens:
        start = len(tokens) - 1 if len(tokens) > len(prompt) else 0
        extents = [(0, start, len(tokens) - start, SAMPLE)]
        tokens += ints(runner.execute(runner.last_plan + 1, plan(admissions=begin, extents=extents)).tokens)
        begin = []
    return tokens[len(prompt) :]


def run_of(result: plan_pb2.Result) -> tuple[int, int, int, list[int]]:
    """Returns status, kept, drafted and tokens of a plan of one row."""
    (entry,) = result.logprobs or [plan_pb2.RowLogprobs()]
    assert len(entry.values) == 4 * result.token_counts[0]
    return result.statuses[0], result.token_counts[0], result.drafted[0], ints(result.tokens)


def test_logits_that_are_not_finite_end_the_run_before_them(folder: Path) -> None:
    """The next run begins there and decides the row's status."""
    wanted = alone(folder)
    stop = wanted.index(next(token for token in wanted[1:] if token not in (*PROMPT, wanted[0])))
    runner, drafting = opened(folder, guesses(PROMPT + wanted), PROMPT, [3, 9, 2])
    poison(drafting, {wanted[stop]})
    first, second = (runner.launch(n, plan(extents=[(0, -1, 8, SAMPLE)], drafts=[7])) for n in (2, 3))
    assert run_of(first.wait()) == (0, stop + 1, 7, wanted[: stop + 1])
    status, kept, _, tokens = run_of(second.wait())
    assert (status, kept, tokens) == (plan_pb2.ROW_STATUS_NOT_FINITE, 0, [])
    assert ints(runner.snapshot().sequences[0].tokens) == PROMPT + wanted[: stop + 1]


def test_a_slot_gets_another_sequence_while_its_run_is_in_flight(folder: Path) -> None:
    wanted, other = alone(folder), alone(folder, [5, 4, 3], 8)
    runner, _ = opened(folder, guesses(PROMPT + wanted), PROMPT, [3, 9, 2])
    late = runner.launch(2, plan(extents=[(0, -1, 4, SAMPLE)], drafts=[3]))
    newcomer = admission(0, [5, 4, 3], [9, 3])
    extents = [(0, 0, 3, SAMPLE)]
    pending = [runner.launch(3, plan(releases=[0], admissions=[newcomer], extents=extents))]
    pending += [runner.launch(n, plan(extents=[(0, -1, 3, SAMPLE)], drafts=[2])) for n in (4, 5)]
    assert run_of(late.wait())[3] == wanted[:4]
    tokens = [token for plan in pending for token in ints(plan.wait().tokens)]
    assert tokens == other[: len(tokens)] and len(tokens) >= 3
    assert ints(runner.snapshot().sequences[0].tokens) == [5, 4, 3, *tokens]


def test_rows_wait_for_masks_beside_rows_that_draft(folder: Path) -> None:
    wanted = alone(folder)
    runner, drafting = opened(folder, guesses(PROMPT + wanted), PROMPT, [3, 9, 2])
    runner.execute(2, plan(admissions=[admission(1, [1, 2, 3], [5, 6])], extents=[(1, 0, 3, AWAIT - AWAIT)]))
    tokens, number, length = [], 3, 4
    runner.execute(3, plan(releases=[1], admissions=[admission(1, [1, 2, 3, 4], [5, 6])], extents=[(1, 0, 3, 0)]))
    for step in range(3):
        extents = [(1, length - 1, 1, AWAIT), (0, -1, 4, SAMPLE)]
        held = runner.launch(number + 1 + step, plan(extents=extents, drafts=[0, 3]))
        held.mask(masks(NUM_TOKENS, {0: [60 + step]}))
        result = held.wait()
        assert list(result.token_counts) == [1, 4] and list(result.drafted) == [0, 3]
        assert ints(result.tokens)[0] == 60 + step
        tokens += ints(result.tokens)[1:]
        length += 1
    assert tokens == wanted
    assert drafting._slots.counters[:2].tolist() == [len(PROMPT) + 12, 7]
    assert drafting._slots.tokens[1, :7].tolist() == [1, 2, 3, 4, 60, 61, 62]


def lying_batch(runner: Runner, count: int) -> StepBatch:
    """Returns a batch that no plan can make: the row of slot 0 with `count` positions, whatever its blocks hold."""
    state = runner._state._states[0]
    batch = batch_of(np.array([-1], np.int32), np.array([count], np.int32))
    batch.states, batch.params = [state], runner._state._params[:1]
    batch.drafts = batch.counts - 1
    batch.lowest, batch.highest = np.zeros(1, np.int32), np.full(1, len(state.tokens) - 1, np.int32)
    return batch


@pytest.mark.parametrize(
    ("tokens", "blocks", "drafted"),
    choice(
        [(6, [3], 2), (8, [3], 0), (9, [3, 4], 7), (254, range(1, 33), 1), (255, range(1, 33), 0)],
        in_ci=[(6, [3], 2), (254, range(1, 33), 1)],
    ),
)
def test_a_plan_that_lies_is_cut_to_the_blocks_and_the_context(
    folder: Path, tokens: int, blocks: list[int], drafted: int
) -> None:
    """The blocks of the slot's last sequence are still in its table behind its own; they are another's by now."""
    prompt = [50 + index % 90 for index in range(tokens)]
    drafting = backend(folder, guesses([*prompt, *range(200, 215)]), max_step_tokens=256)
    assert drafting.model.context_length == 256
    runner = Runner(drafting)
    every = admission(0, [1, 2], range(33, 60))
    runner.execute(1, plan(admissions=[every]))
    again = plan(releases=[0], admissions=[admission(0, prompt, blocks)], extents=[(0, 0, len(prompt) - 1, 0)])
    runner.execute(2, again)
    drafting.cache.data[:, :, 33:] = -7.0
    output = drafting.launch(lying_batch(runner, 8)).wait()
    assert output.drafted.tolist() == [drafted]
    assert (drafting.cache.data[:, :, 33:] == -7.0).all(), "it wrote into blocks of others"
    assert int(drafting._slots.counters[0]) == tokens + int(output.token_counts[0]) <= 256


@pytest.mark.parametrize("counter", choice([9, 256, 4000, 0, -5], in_ci=[9, -5]))
def test_a_counter_beyond_its_blocks_computes_nothing(folder: Path, counter: int) -> None:
    runner, drafting = opened(folder, guesses([]), PROMPT, [3])
    drafting._slots.counters[0] = counter
    cache, tokens = drafting.cache.data[:, :, 1:].clone(), drafting._slots.tokens.clone()
    output = drafting.launch(lying_batch(runner, 4)).wait()
    assert (output.statuses.tolist(), output.token_counts.tolist()) == ([plan_pb2.ROW_STATUS_FAILED], [0])
    torch.testing.assert_close(drafting.cache.data[:, :, 1:], cache, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(drafting._slots.tokens, tokens) and int(drafting._slots.counters[0]) == counter
