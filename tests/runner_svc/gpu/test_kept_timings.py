"""A start with kept timings times nothing, captures what the first start chose, and answers alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from runner_svc.execution.runner import Runner
from runner_svc.gpu.backend import CudaBackend
from runner_svc.launch.starting import measure
from runner_svc.startup import step_costs
from runner_svc.startup.step_costs import Step
from runner_svc.timings.timings_file import TimingsFile
from tests.support import host_backend as host_backend_module
from tests.support.host_backend import host_backend
from tests.support.host_device import HostDevice
from tests.support.plans import SAMPLE, admission, ints, plan
from tests.support.tiny_models import make_tiny_model

KEY = {"card": "host"}


class TimedDevice(HostDevice):
    """Counts what it captures and times; the third thing to be timed at a size is the fastest."""

    def __init__(self) -> None:
        super().__init__(mixed_graphs=True)
        self.timed = self.asked_late = 0

    def seconds(self, replay: Callable[[], None]) -> float:
        self.timed += 1
        return 1.0 / (1 + self.timed % 3)

    def is_late(self, launch: Callable[[], None], replay: Callable[[], None]) -> bool:
        self.asked_late += 1
        return self.asked_late < 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny")


def started(folder: Path, kept: TimingsFile, num_slots: int = 5) -> tuple[CudaBackend, TimedDevice]:
    device = TimedDevice()
    sizes = {"num_slots": num_slots, "block_size": 8, "max_step_tokens": 80, "num_blocks": 60}
    return host_backend(folder, **sizes, device=device, kept_timings=kept), device


def answer(backend: CudaBackend) -> list[int]:
    runner = Runner(backend)
    first = runner.execute(1, plan(admissions=[admission(0, [5, 6, 7], [3])], extents=[(0, 0, 3, SAMPLE)]))
    return ints(first.tokens) + ints(runner.execute(2, plan(extents=[(0, 3, 1, SAMPLE)])).tokens)


def test_a_second_start_times_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_costs, "steps_to_measure", lambda hello: [Step(1, 8), Step(0, 0, 16)])
    monkeypatch.setattr(step_costs, "GPU_SECONDS", 60.0)
    runners, graphs, devices, told, answers = [], [], [], [], []
    shares: dict[str, float] = {}
    monkeypatch.setattr(host_backend_module, "no_progress", shares.__setitem__)
    for _ in range(2):
        shares.clear()
        kept = TimingsFile(tmp_path, KEY)
        backend, device = started(folder, kept)
        runners.append(Runner(backend))
        with capture_logs() as lines:
            measure(runners[-1], "cuda", kept)
        graphs.append((backend.decode_graphs.sizes, backend._mixed_graphs.sizes, backend._steps.fusions.seconds))
        devices.append(device)
        assert set(shares.values()) == {1.0}, shares
        told.append([line["event"] for line in lines])
        answers.append(answer(backend))
    first, second = devices
    assert first.timed > 0 and second.timed == 0 and second.asked_late == 0
    assert second.captured == len(graphs[1][0]) + len(graphs[1][1]) < first.captured
    assert graphs[0] == graphs[1] and runners[0].step_costs == runners[1].step_costs != []
    assert told == [
        ["the timings are kept for the next start", "measured the steps"],
        ["steps were measured at an earlier start"],
    ]
    assert answers[0] == answers[1]


def test_timings_of_other_sizes_are_measured_again(folder: Path, tmp_path: Path) -> None:
    """The key has the sizes; this is for a mistake in it."""
    kept = TimingsFile(tmp_path, KEY)
    started(folder, kept)
    kept.keep()
    again = TimingsFile(tmp_path, KEY)
    _, device = started(folder, again, num_slots=8)
    assert device.timed > 0 and again.timings.decode is not None and max(again.timings.decode.seconds) == 8


def test_captures_end_where_memory_for_another_lacks(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy, _ = started(folder, TimingsFile(tmp_path, KEY))
    monkeypatch.setattr(TimedDevice, "has_room", lambda device: False)
    full, device = started(folder, TimingsFile(tmp_path / "full", KEY))
    assert roomy._mixed_graphs.sizes and not full._mixed_graphs.sizes
    assert device.asked_late == 0 and answer(full) == answer(roomy)
