"""A step that fails to launch, or can't be waited for: its page-locked buffers are freed only after an event, as the
launched part may still read and write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from roster_protos import plan_pb2
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.runner import Runner
from runner_svc.gpu.backend import MAX_IN_FLIGHT, CudaBackend
from tests.support.host_backend import host_backend
from tests.support.host_device import HostDevice, HostEvent
from tests.support.plans import AWAIT, SAMPLE, admission, plan, sampling
from tests.support.tiny_models import make_tiny_model


class LateEvent(HostEvent):
    """Completes when it is waited for."""

    def __init__(self) -> None:
        self.waited = False
        self.problem: Exception | None = None

    def synchronize(self) -> None:
        if self.problem is not None:
            raise self.problem
        self.waited = True


class LateDevice(HostDevice):
    """Keeps its recorded events; recording those in `fails_at` fails."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[LateEvent] = []
        self.fails_at: set[int] = set()

    def event(self) -> LateEvent:
        if len(self.events) in self.fails_at:
            self.fails_at.remove(len(self.events))
            raise RuntimeError("no event")
        self.events.append(LateEvent())
        return self.events[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny")


def fails(*args: object, **kwargs: object) -> None:
    raise RuntimeError("it failed")


@pytest.fixture
def device() -> LateDevice:
    return LateDevice()


@pytest.fixture
def backend(folder: Path, device: LateDevice) -> CudaBackend:
    return host_backend(folder, num_slots=2, block_size=8, max_step_tokens=16, num_blocks=8, device=device)


def opening() -> plan_pb2.Plan:
    asked = sampling(logprobs=1, prompt_logprobs=1)
    return plan(
        admissions=[admission(0, [1, 2, 3], [1], sampling=asked), admission(1, [4, 5, 6], [2])],
        extents=[(0, 0, 3, SAMPLE), (1, 0, 3, AWAIT)],
    )


@pytest.mark.parametrize(
    "part",
    ["_pack_rows", "_copy", "_scatter", "_prompt_logprobs", "_sampling", "_keep_masked_rows", "forward", "last event"],
)
def test_a_step_that_fails_to_launch_frees_its_buffers_after_an_event(
    part: str, backend: CudaBackend, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(backend)
    if part == "forward":
        monkeypatch.setattr(backend._steps, "run_mixed", fails)
    elif part == "last event":
        device.fails_at = {len(device.events) + 2}
    else:
        monkeypatch.setattr(backend, part, fails)
    with pytest.raises(PlanFault, match=r"it failed|no event"):
        runner.launch(1, opening())
    (behind,) = (event for event in device.events[-1:])
    assert not behind.waited
    free = [backend._ring.take_entry() for _ in range(MAX_IN_FLIGHT - 1)]
    assert not behind.waited, "others were freed at once"
    assert backend._ring.take_entry() not in free and behind.waited


def test_buffers_without_an_event_are_never_freed(
    backend: CudaBackend, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_sampling", fails)
    count = len(device.events)
    device.fails_at = {count + 2}  # of a step: its begin, the end of its forward pass, and this one
    with pytest.raises(PlanFault, match="no event"):
        Runner(backend).launch(1, opening())
    assert backend._ring._free.qsize() == MAX_IN_FLIGHT - 1


def test_the_next_session_computes_as_usual(
    folder: Path, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = plan(admissions=[admission(0, [1, 2, 3], [1])], extents=[(0, 0, 3, SAMPLE)])
    other = host_backend(folder, num_slots=2, block_size=8, max_step_tokens=16, num_blocks=8)
    expected = Runner(other).execute(1, step).tokens
    runner = Runner(backend)
    for _ in range(2 * MAX_IN_FLIGHT):
        with monkeypatch.context() as patch:
            patch.setattr(backend, "_sampling", fails)
            with pytest.raises(PlanFault, match="it failed"):
                runner.launch(1, opening())
        runner.reset()
    assert runner.execute(1, step).tokens == expected


def test_a_step_that_can_not_be_waited_for_keeps_its_buffers(backend: CudaBackend, device: LateDevice) -> None:
    launched = Runner(backend).launch(1, plan(admissions=[admission(0, [1, 2], [1])], extents=[(0, 0, 2, SAMPLE)]))
    device.events[-1].problem = RuntimeError("the device is lost")
    with pytest.raises(PlanFault, match="the device is lost"):
        launched.wait()
    for _ in range(MAX_IN_FLIGHT - 1):
        backend._ring.take_entry()
    with pytest.raises(RuntimeError, match="the device is lost"):
        backend._ring.take_entry()
