"""Shapes of verifying passes, and which are captured when."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from runner_svc.execution.runner import Runner
from runner_svc.gpu.drafts import verify_graphs
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.drafted_steps import VerifyShape
from runner_svc.gpu.drafts.drafting_backend import DraftingCudaBackend
from scheduler_svc.policy import DraftRows, Load, Policy, PolicyGuard, PolicyParameters
from tests.support.drafters import Prophet
from tests.support.host_backend import host_backend
from tests.support.host_device import HostDevice
from tests.support.host_drafts import HostDrafter
from tests.support.in_process import Stack
from tests.support.plans import SAMPLE, admission, plan
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny")


def backend(
    folder: Path, drafts: DraftOptions, device: HostDevice | None = None, num_slots: int = 12, positions: int = 48
) -> DraftingCudaBackend:
    sizes = {"num_slots": num_slots, "block_size": 8, "max_step_tokens": positions, "num_blocks": 90}
    made = host_backend(folder, **sizes, drafts=drafts, device=device)
    assert isinstance(made, DraftingCudaBackend)
    return made


def test_drafts_are_cut_to_the_positions_that_have_logits(folder: Path) -> None:
    made = backend(folder, DraftOptions())
    assert made.max_sampled == 48 == len(made._steps.logits) == Runner(made).hello().max_sampled
    shape = made.verify_graphs.shape
    assert [shape(1, most) for most in (0, 1, 2, 5, 7)] == [VerifyShape(1, stride) for stride in (1, 2, 4, 6, 8)]
    assert [shape(rows, 7) for rows in (3, 6, 7, 9, 12)] == [
        VerifyShape(4, 8),
        VerifyShape(6, 8),
        VerifyShape(8, 6),
        VerifyShape(12, 4),
        VerifyShape(12, 4),
    ]
    assert all(each.num_tokens <= 48 for each in made.verify_graphs.captured)
    assert DraftOptions(max_drafts=4).strides == [2, 4, 5] and DraftOptions(max_drafts=1).widest == 2
    with pytest.raises(ValueError, match="1 to 7 drafts"):
        DraftOptions(max_drafts=8)


def test_a_rare_shape_is_padded_until_it_is_used_often(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_graphs, "ROWS_AT_START", (1, 16))
    monkeypatch.setattr(verify_graphs, "CAPTURED_AT", 3)
    device = HostDevice()
    made = backend(folder, DraftOptions(), device, num_slots=30, positions=120)
    runner = Runner(made)
    slots = range(17)
    admissions = [admission(slot, [1, 2, 3], [1 + 2 * slot, 2 + 2 * slot]) for slot in slots]
    runner.execute(1, plan(admissions=admissions, extents=[(slot, 0, 2, 0) for slot in slots]))
    replays, captured = [], []
    for number in (2, 3, 4):
        before = device.replays
        drafts = [2 for _ in slots]
        runner.execute(number, plan(extents=[(slot, -1, 3, SAMPLE) for slot in slots], drafts=drafts))
        replays.append(device.replays - before)
        captured.append(VerifyShape(24, 4) in made.verify_graphs.captured)
    assert replays == [1, 1, 1] and captured == [False, False, True]
    assert VerifyShape(30, 4) in made.verify_graphs.captured


PROMPTS = [([40, 41, 42, 43] * 4)[: 12 + number] for number in range(4)]


class MostDrafts(Policy):
    name = "most"

    def drafts(self, load: Load, rows: DraftRows) -> object:  # type: ignore[override]
        return rows.most


def texts(folder: Path, drafts: DraftOptions | None) -> tuple[list[list[int]], int]:
    """Returns the texts of some requests of an engine, and the accepted drafts."""
    stack = Stack(depth=2, guard=PolicyGuard(MostDrafts(PolicyParameters())))
    sizes = {"num_slots": 3, "block_size": 8, "max_step_tokens": 48, "num_blocks": 40}
    stack.add_runner(host_backend(folder, **sizes, drafts=drafts))
    requests = [stack.submit(prompt, 20, seed=n, tenant="t") for n, prompt in enumerate(PROMPTS)]
    stack.run(random.Random(3))
    accepted = stack.engine.snapshots.take_snapshot().status.totals.accepted_tokens
    return [request.streams[0].tokens for request in requests], accepted


def test_an_engines_texts_are_those_without_drafts(folder: Path) -> None:
    """Two plans in flight, prefix hits, admissions and ends beside rows that draft, with errors."""
    expected, _ = texts(folder, None)
    prophet = Prophet(random.Random(4), NUM_TOKENS, wrong=0.2)
    prophet.texts = [prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)]
    options = DraftOptions("told", 7, lambda _, slots: HostDrafter(prophet, slots.tokens, slots.counters))
    drafted, accepted = texts(folder, options)
    assert drafted == expected and min(map(len, expected)) > 0
    assert accepted > 10
