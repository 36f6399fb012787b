"""A request that crashes runners is found, a faulty runner alone gets no request refused, and refusals say why."""

from __future__ import annotations

import grpc
import pytest

from scheduler_svc.link.runner_events import Loss
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.model.suspicion import LONE_LOSSES, PARDONS, STRIKES
from tests.support.hospital import FATAL, Hospital, served

INTERNAL = grpc.StatusCode.INTERNAL.value[0]


# ---------------------------------------------------------------------- one runner alone


@pytest.mark.parametrize("loss", [Loss.FAULT, Loss.GONE, Loss.SILENT, Loss.MEMORY])
def test_the_only_runner_is_faulty_and_no_request_is_refused(loss: Loss) -> None:
    """Requests wait and the service is not ready; both recover with the runner."""
    hospital = Hospital("ill")
    hospital.ill["ill"] = loss
    requests = [hospital.submit(number) for number in range(6)]
    late = hospital.submit(9, timeout_ms=2000)
    hospital.turns(20.0)
    assert not hospital.engine.reports.model_state().model.ready and not hospital.engine.pool.progress(
        hospital.stack.now_s
    )
    assert late.streams[0].end is not None and late.streams[0].end.reason == FinishReason.DEADLINE
    assert all(request.refused is None and request.streams[0].end is None for request in requests)
    assert all(not live.suspicion.strikes for live in hospital.engine.requests.book.live())
    assert len(hospital.losses) < 9
    del hospital.ill["ill"]
    hospital.run(40.0)
    assert served(*requests)
    assert hospital.engine.reports.model_state().model.ready and hospital.engine.pool.progress(hospital.stack.now_s)
    hospital.stack.assert_clean()


def test_streams_end_in_time_if_all_runners_stay_faulty() -> None:
    hospital = Hospital("ill", no_runner_s=20)
    hospital.ill["ill"] = Loss.FAULT
    request = hospital.submit()
    hospital.run(40.0)
    (stream,) = request.streams
    assert stream.end is not None and stream.end.reason == FinishReason.UNAVAILABLE
    assert stream.end.message == "all connected runners fail every plan"


@pytest.mark.parametrize("neighbours", [0, 12])
@pytest.mark.parametrize("loss", [Loss.FAULT, Loss.GONE])
def test_one_runner_suffices_to_find_a_request_that_ends_it(loss: Loss, neighbours: int) -> None:
    """If others wait, they are computed between its isolations; otherwise the probe is."""
    hospital = Hospital("only")
    hospital.fatal = loss
    beside = [hospital.submit(number) for number in range(neighbours)]
    fatal = hospital.fatal_request()
    hospital.run(60.0)
    assert fatal.refused is not None and fatal.refused.code == INTERNAL
    assert served(*beside)
    assert len(hospital.losses) <= STRIKES + LONE_LOSSES + 2
    assert hospital.engine.probation.illness.of("only") is None, "the request explains its losses"
    assert not hospital.engine.reports.status().held_back
    hospital.stack.assert_clean()


def test_two_that_end_the_only_runner_do_not_shield_each_other() -> None:
    hospital = Hospital("only")
    hospital.fatal = Loss.FAULT
    fatal = [hospital.fatal_request(), hospital.fatal_request()]
    hospital.run(120.0)
    assert all(request.refused is not None and request.refused.code == INTERNAL for request in fatal)
    assert len(hospital.losses) <= STRIKES + 2 * LONE_LOSSES + 2


def test_a_refusal_needs_losses_of_both_runners() -> None:
    """A refusal needs a loss on both, though one of them is less loaded each time."""
    hospital = Hospital("a", "b")
    hospital.fatal = Loss.FAULT
    long = [hospital.submit(number, 60) for number in range(3)]
    fatal = hospital.fatal_request()
    while fatal.refused is None:
        hospital.turn()
    assert sorted(hospital.losses[-2:]) == ["a", "b"]
    hospital.run()
    assert served(*long)


def test_a_request_alone_with_a_lack_of_memory_waits_for_its_deadline() -> None:
    """The probe needs next to no memory, so a passed probe is no evidence against the request."""
    hospital = Hospital("only")
    hospital.fatal = Loss.MEMORY
    request = hospital.stack.submit([1, FATAL, 2], 8, timeout_ms=100_000)
    hospital.run(150.0)
    assert request.refused is None and request.streams[0].end is not None
    assert request.streams[0].end.reason == FinishReason.DEADLINE
    assert len(hospital.losses) <= PARDONS + STRIKES + 8, "held back for longer each time"


def test_a_lack_of_memory_that_others_do_not_have_is_attributed() -> None:
    """The same, but other requests are computed between two losses of this one in isolation."""
    hospital = Hospital("only")
    hospital.fatal = Loss.MEMORY
    request = hospital.stack.submit([1, FATAL, 2], 8)
    beside = []
    for number in range(150):
        hospital.turns(1.0)
        beside.append(hospital.submit(number))
        if request.refused is not None:
            break
    assert request.refused is not None and request.refused.code == INTERNAL
    assert "ran out of memory" in request.refused.message
    hospital.run()
    assert served(*beside)


# ---------------------------------------------------------------------- messages


WORDS = {
    Loss.GONE: "the process that computed it ended, or its connection broke",
    Loss.SILENT: "stopped responding",
    Loss.HUNG: "did not end its step in time",
    Loss.FAULT: "answered with a fault",
    Loss.MEMORY: "ran out of memory",
    Loss.REPLACED: "replaced by a new one",
    Loss.UNSOUND: "sent an impossible answer",
}


@pytest.mark.parametrize("loss", [loss for loss in Loss if loss is not Loss.LEFT])
def test_a_refusal_says_what_happened(loss: Loss) -> None:
    hospital = Hospital("a", "b", "c")
    hospital.fatal = loss
    request = hospital.fatal_request()
    hospital.run(120.0)
    assert request.refused is not None and request.refused.code == INTERNAL
    assert WORDS[loss] in request.refused.message
    assert not any(words in request.refused.message for other, words in WORDS.items() if other is not loss)


def test_a_refusal_says_both_things_that_happened() -> None:
    hospital = Hospital("a", "b", "c")
    request = hospital.fatal_request()
    while request.refused is None:
        hospital.fatal = Loss.FAULT if len(hospital.losses) < STRIKES + LONE_LOSSES - 1 else Loss.HUNG
        hospital.turn()
    assert WORDS[Loss.FAULT] in request.refused.message and WORDS[Loss.HUNG] in request.refused.message


@pytest.mark.parametrize(
    "reason",
    [
        "plan 3 failed in the backend: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
        "total capacity of 79.1 GiB of which 1.2 GiB is free. Process 4321 has 60.0 GiB memory in use.",
        "plan 3 failed in the backend: _ArrayMemoryError: Unable to allocate 8.00 GiB for an array",
        "plan 3 failed in the backend: RuntimeError: [enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 34359738368 bytes.",
        "plan 3 failed in the backend: AcceleratorError: CUDA error: out of memory",
        "plan 3 failed in the backend: RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
        "plan 3 failed in the backend: DriverError: CUDA_ERROR_OUT_OF_MEMORY",
    ],
)
def test_a_lack_of_memory_is_recognised_by_the_fault(reason: str) -> None:
    assert Loss.of_fault(reason) is Loss.MEMORY


@pytest.mark.parametrize(
    "reason", ["plan 2 can't follow plan 0", "KeyError: 'memory'", "RuntimeError: an illegal memory access"]
)
def test_other_faults_are_no_lack_of_memory(reason: str) -> None:
    assert Loss.of_fault(reason) is Loss.FAULT
