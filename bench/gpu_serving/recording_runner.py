"""`roster-runner` that records the times of each plan's stages, and writes them to an .npz file when it ends.

    python -m bench.gpu_serving.recording_runner --record FILE [--profile FILE] [--certain] [--drafts-right SHARE]
        [flags of roster-runner]

SIGUSR1 starts and stops a recording by torch's profiler of each kernel's begin and end; the second signal saves it.
`--certain`: random weights have certain texts. `--drafts-right`: what drafts on a GPU knows them, but errs; at SIGUSR2
it reads another share from a file beside the record.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu_serving.step_record import StepRecord
from roster_common.logs import configure_logs
from roster_common.service_command import read_command_line
from roster_common.setting_sources import UnusableSettings
from roster_protos import plan_pb2
from runner_svc.execution.runner import LaunchedPlan, Runner
from runner_svc.link.curve import CurveClient
from runner_svc.link.plan_socket import PlanSocket
from runner_svc.service import serve
from runner_svc.settings.runner_settings import RunnerSettings
from scheduler_svc.simulator.cost_model import StepWork

RIGHT = ".right"
"""Suffix of the file with the share of right drafts."""

Times = dict[int, list[int]]
"""Values of a StepRecord row by plan, as far as known."""


class TimedPlan:
    """In-flight plan that records when its result was ready.

    It refers to the plan, not the plan to it: otherwise each step would leave a reference cycle to the garbage
    collector, whose pauses would be measured as the runner's.
    """

    def __init__(self, launched: LaunchedPlan, times: list[int]) -> None:
        self._launched = launched
        self._times = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launched, name)

    def wait(self) -> plan_pb2.Result:
        """Waits like `LaunchedPlan.wait`."""
        result = self._launched.wait()
        self._times.append(time.monotonic_ns())
        return result


class RecordingSocket(PlanSocket):
    """Plan socket that records times, its own and its runner's."""

    def __init__(
        self,
        runner: Runner,
        endpoint: str,
        silence_s: float,
        curve: CurveClient | None,
        plan_timeout_s: float,
        records: list[list[int]],
    ) -> None:
        self._times: Times = {}
        self._drafts: dict[int, int] = {}
        self._records = records
        launch = runner.launch

        def recorded_launch(number: int, plan: plan_pb2.Plan) -> LaunchedPlan:
            begin = time.monotonic_ns()
            launched = launch(number, plan)
            times = self._times[number]
            times += [begin, time.monotonic_ns()]
            return TimedPlan(launched, times)  # type: ignore[return-value]

        runner.launch = recorded_launch  # type: ignore[method-assign]
        super().__init__(runner, endpoint, silence_s, curve, plan_timeout_s)

    def _take_plan(self, number: int, plan: plan_pb2.Plan) -> None:
        received, work = time.monotonic_ns(), StepWork.of_plan(plan)
        pairs = int(work.prefill_pairs)
        self._times[number] = [work.sequences, work.tokens, work.context_tokens, pairs, received]
        if plan.extent_drafts:
            self._drafts[number] = sum(plan.extent_drafts)
        super()._take_plan(number, plan)

    def _post(self, message: plan_pb2.ToScheduler) -> bytes:
        frame = super()._post(message)
        if message.HasField("result"):
            timings = message.result.timings
            gpu = [timings.idle_ns, timings.prepare_ns, timings.forward_ns, timings.sample_ns]
            drafts = [self._drafts.pop(message.number, 0), *_verified(message.result)]
            self._records.append([*self._times.pop(message.number), time.monotonic_ns(), *gpu, *drafts])
        return frame


def _verified(result: plan_pb2.Result) -> tuple[int, int]:
    """Returns the drafted and the accepted tokens of a step."""
    pairs = zip(result.drafted, result.token_counts, strict=False)  # the first is empty without drafts
    return sum(result.drafted), sum(max(0, tokens - 1) for drafted, tokens in pairs if drafted)


class KernelProfiler:
    """torch's profiler, started and stopped by a signal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._profiler: Any
        self._begin()  # the first start takes seconds
        self._profiler.stop()
        self._profiler = None

    def switch(self, *_: object) -> None:
        """Starts the profiler, or stops it and saves the recording."""
        if self._profiler is None:
            self._begin()
        else:
            self._save()

    def _begin(self) -> None:
        import torch

        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.start()

    def _save(self) -> None:
        from torch.autograd import DeviceType

        self._profiler.stop()
        events = [event for event in self._profiler.events() if event.device_type == DeviceType.CUDA]
        ranges = np.array([(event.time_range.start, event.time_range.end) for event in events], np.float64)
        names = np.array([event.name for event in events])
        partial = self._path.with_suffix(".partial.npz")
        np.savez(partial, times_us=ranges.reshape(-1, 2), names=names)
        partial.rename(self._path)
        self._profiler = None


def _make_certain(right: float | None, file: Path) -> None:
    """Makes a GPU's random weights those of certain texts, and drafts right with this probability, if it is given.

    At SIGUSR2 the probability becomes that in `file`.
    """
    from bench.common.certain_text import SuccessorDrafts, certain, shift_of
    from runner_svc.gpu import loading
    from runner_svc.gpu.drafts import draft_options

    random_weights, sizes = loading.random_weights, list[tuple[int, int]]()
    drafters: list[SuccessorDrafts] = []

    def certain_weights(config: Any, *arguments: Any, **options: Any) -> Any:
        sizes.append((shift_of(config), config.vocab_size))
        return certain(random_weights(config, *arguments, **options), config)

    def drafter(launchers: object, slots: Any) -> SuccessorDrafts:
        drafters.append(SuccessorDrafts(slots, *sizes[-1], right or 0.0))
        return drafters[-1]

    def reread(*_: object) -> None:
        for each in drafters:
            each.be_right(float(file.read_text()))

    loading.random_weights = certain_weights  # type: ignore[assignment]
    if right is not None:
        made = partial(draft_options.DraftOptions, make=drafter)
        draft_options.DraftOptions = made  # type: ignore[misc, assignment]
        signal.signal(signal.SIGUSR2, reread)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)  # --draft is the runner's
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--certain", action="store_true")
    parser.add_argument("--drafts-right", type=float, metavar="SHARE")
    arguments, flags = parser.parse_known_args()
    try:
        settings = read_command_line(RunnerSettings, "recording_runner", "", str, flags)
    except UnusableSettings as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    configure_logs(settings.log_format, settings.log_level)
    if arguments.profile is not None:
        signal.signal(signal.SIGUSR1, KernelProfiler(arguments.profile).switch)
    records: list[list[int]] = []

    def recording_link(
        runner: Runner, endpoint: str, silence_s: float, curve: CurveClient | None, plan_timeout_s: float
    ) -> PlanSocket:
        return RecordingSocket(runner, endpoint, silence_s, curve, plan_timeout_s, records)

    if arguments.certain or arguments.drafts_right is not None:
        _make_certain(arguments.drafts_right, arguments.record.with_suffix(RIGHT))
    status = serve(settings, recording_link)
    StepRecord.of(records).save(arguments.record)
    sys.exit(status)


if __name__ == "__main__":
    main()
