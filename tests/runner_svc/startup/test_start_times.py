"""The seconds of a start are logged by phase, from the start of the process."""

from __future__ import annotations

import time

from runner_svc.startup.start_times import StartTimes, process_age_s


def test_phases_follow_each_other_and_operations_are_phases() -> None:
    now_s = 10.0
    times = StartTimes(lambda: now_s, already_s=1.5)
    told: list[tuple[str, float]] = []
    progress = times.watching(lambda what, share: told.append((what, share)))
    for phase, share in (("loading weights", 0.0), ("capturing CUDA graphs", 0.0), ("capturing CUDA graphs", 1.0)):
        now_s += 2.0
        progress(phase, share)
    times.begin("loading weights")
    now_s += 0.25
    times.begin("connecting")
    assert times.fields() == {
        "seconds": 7.75,
        "importing": 3.5,
        "loading_weights": 2.25,
        "capturing_cuda_graphs": 2.0,
    }
    assert told == [("loading weights", 0.0), ("capturing CUDA graphs", 0.0), ("capturing CUDA graphs", 1.0)]


def test_fields_have_no_names_of_models_or_files() -> None:
    now_s = 0.0
    times = StartTimes(lambda: now_s, already_s=0.0)
    for phase in (
        "downloading org/model (1.5 GB)",
        "converting model.gguf (once)",
        "converting mmproj.gguf (once)",
        "comparing with the model's own attention",
    ):
        times.begin(phase)
        now_s += 1.0
    assert times.fields() == {
        "seconds": 4.0,
        "downloading": 1.0,
        "converting": 2.0,
        "comparing_with_the_models_own_attention": 1.0,
    }


def test_the_age_of_the_process_grows() -> None:
    first = process_age_s()
    time.sleep(0.05)
    assert 0 < first < process_age_s()
