"""Verifying passes of many places take the variant that was the fastest when the start timed them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.gpu.drafts import verify_graphs
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.drafted_steps import VerifyShape
from runner_svc.gpu.drafts.drafting_backend import DraftingCudaBackend
from runner_svc.timings.timings_file import TimingsFile
from tests.support.host_backend import host_backend
from tests.support.host_device import HostDevice
from tests.support.tiny_models import make_tiny_model

SIZES = {"num_slots": 12, "block_size": 8, "max_step_tokens": 48, "num_blocks": 90}


class TimedDevice(HostDevice):
    """Of the things that are timed in turns, the last is the fastest; counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.timed = 0

    def seconds(self, replay: Callable[[], None]) -> float:
        replay()
        self.timed += 1
        return 1.0 / self.timed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny")


def started(folder: Path, kept: TimingsFile) -> tuple[DraftingCudaBackend, TimedDevice]:
    device = TimedDevice()
    made = host_backend(folder, **SIZES, drafts=DraftOptions("ngram", 3), device=device, kept_timings=kept)
    assert isinstance(made, DraftingCudaBackend)
    return made, device


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes passes of more than 8 places those of many."""
    monkeypatch.setattr(verify_graphs, "MAX_ROWS", 8)
    monkeypatch.setattr(verify_graphs, "TIMED_SIZES", (16, 32))
    monkeypatch.setattr(verify_graphs, "ROWS_AT_START", (1, 2, 4, 7))


@pytest.mark.usefixtures("few_rows")
def test_the_fastest_of_the_next_timed_size_is_taken(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second start times nothing and chooses alike."""
    inputs: dict[int, torch.Tensor] = {}
    time = verify_graphs.VerifyGraphs.time

    def spied(graphs: verify_graphs.VerifyGraphs, prepare: Callable[[VerifyShape], None], *rest: object) -> None:
        def prepared(shape: VerifyShape) -> None:
            prepare(shape)
            steps = graphs._steps
            steps.given_variants(lambda: 0, shape)[0].launch()
            inputs[shape.num_tokens] = steps._inputs[:, : shape.num_tokens].clone()
            assert steps.logits[: shape.num_tokens].isfinite().all()

        time(graphs, prepared, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(verify_graphs.VerifyGraphs, "time", spied)
    first, device = started(folder, kept := TimingsFile(tmp_path, {"card": "host"}))
    assert device.timed > 0 and kept.timings.verify is not None
    assert kept.timings.verify.sizes == [16, 32] == list(kept.timings.verify.seconds)
    for places, (tokens, positions, mapping) in inputs.items():
        assert len(tokens.unique()) > places // 2  # equal rows would take less power
        assert int(positions.min()) > 0 and len(mapping.unique()) == places
    graphs = first.verify_graphs
    ways = [way.name for way in first._steps.verify_variants(lambda: 0, VerifyShape(3, 4))]
    assert len(ways) > 1
    for shape in (VerifyShape(3, 4), VerifyShape(4, 4), VerifyShape(7, 4), VerifyShape(12, 2)):
        assert graphs.variant(shape).name == ways[-1]
    assert not first._slots.words.any() and not first._slots.num_blocks.any()
    second, device = started(folder, kept)
    assert device.timed == 0 and second.verify_graphs.variant(VerifyShape(3, 4)).name == ways[-1]
    kept.timings.verify.seconds[16][ways[0]] = 0.0
    third, _ = started(folder, kept)
    assert third.verify_graphs.variant(VerifyShape(4, 4)).name == ways[0]
    assert third.verify_graphs.variant(VerifyShape(7, 4)).name == ways[-1]


def test_passes_of_few_places_are_those_of_decode_steps(folder: Path, tmp_path: Path) -> None:
    made, _ = started(folder, kept := TimingsFile(tmp_path, {"card": "host"}))
    assert kept.timings.verify is not None and not kept.timings.verify.seconds
    assert isinstance(made._decoder, CudaDecoder)
    size = made.decode_graphs.bucket(12)
    assert size is not None
    assert made.verify_graphs.variant(VerifyShape(3, 4)).name == made.decode_graphs.variant(size)
