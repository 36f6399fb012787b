"""The service under test: `roster-scheduler` and a recording runner as processes on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from bench.gpu_serving.client import ClientRecord
from bench.gpu_serving.recording_runner import RIGHT
from bench.gpu_serving.step_record import StepRecord
from roster_client.client import RosterClient
from roster_client.client.errors import UnavailableError
from roster_client.serve.child_process import ChildProcess
from roster_client.serve.stack import Endpoints
from roster_common.setting_options import as_arguments

RUNNER_GRACE_S = 20.0


class NoService(RuntimeError):
    """Raised if the scheduler or the runner ended or did not become ready; the message is their last output."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The scheduler's settings for a load."""

    policy: str | None  # None: the scheduler's default
    policy_parameters: str  # JSON
    depth: int | None  # None: by the profile
    flags: tuple[str, ...] = ()

    def changed(self, settings: Mapping[str, Any]) -> Self:
        """Returns a copy with other settings: `depth`, `plan_lead_ms`, or any parameter of the policy."""
        others = dict(settings)
        depth, lead_ms = others.pop("depth", self.depth), others.pop("plan_lead_ms", None)
        flags = self.flags if lead_ms is None else (*self.flags, f"--plan-lead-ms={lead_ms}")
        merged = parameters(**json.loads(self.policy_parameters) | others)
        return replace(self, policy_parameters=merged, depth=depth, flags=flags)


def card_of(device: str) -> dict[str, Any] | None:
    """Returns the GPU, None for other devices. Call it after the runner has ended, because it allocates GPU memory."""
    if device != "cuda":
        return None
    from bench.common.gpu_timing import card

    return card()


class Service:
    """Both processes; an async context manager. The first `schedule` starts the scheduler."""

    def __init__(
        self, folder: Path, runner_flags: Mapping[str, object], profiled: bool, recorder_flags: Sequence[str] = ()
    ) -> None:
        """`folder` receives the runner's records; `runner_flags` are settings of the runner by name.

        `profiled`: whether the profiler will record a load. `recorder_flags`: of `recording_runner` itself.
        """
        self._recorder_flags = recorder_flags
        self._folder = folder
        self._profiled = profiled
        self._flags = {"link": "", **runner_flags}
        self._endpoints = Endpoints.free()
        self._runner: ChildProcess | None = None
        self._scheduler: ChildProcess | None = None
        self._scheduling: Scheduling | None = None
        self._started_s = time.monotonic()
        self.ready_s = 0.0

    @property
    def address(self) -> str:
        """Address of the public API."""
        return self._endpoints.listen

    @property
    def admin_address(self) -> str:
        """Address of the admin API."""
        return self._endpoints.admin_listen

    async def __aenter__(self) -> Self:
        flags = {**self._flags, "link": self._endpoints.link}
        command = [
            *(sys.executable, "-m", "bench.gpu_serving.recording_runner"),
            f"--record={self._folder / 'steps.npz'}",
            *([f"--profile={self._folder / 'kernels.npz'}"] if self._profiled else []),
            *self._recorder_flags,
            *as_arguments(flags),
        ]
        self._runner = await ChildProcess.start("runner", command, _print)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop_scheduler()
        if self._runner is not None:
            await self._runner.stop(RUNNER_GRACE_S)

    async def schedule(self, scheduling: Scheduling, timeout_s: float = 300.0) -> None:
        """Starts a scheduler with these settings and waits until it serves; keeps the runner. Raises NoService."""
        if scheduling == self._scheduling:
            return
        await self._stop_scheduler()
        self._scheduling = scheduling
        endpoints = self._endpoints
        command = [
            *(sys.executable, "-m", "scheduler_svc.main", f"--listen={endpoints.listen}", f"--link={endpoints.link}"),
            *(
                f"--admin-listen={endpoints.admin_listen}",
                "--metrics-listen=",
                "--log-level=warning",
            ),
            *([] if scheduling.policy is None else [f"--policy={scheduling.policy}"]),
            f"--policy-parameters={scheduling.policy_parameters}",
            *([] if scheduling.depth is None else [f"--depth={scheduling.depth}"]),
            *scheduling.flags,
        ]
        self._scheduler = await ChildProcess.start("scheduler", command, _print)
        async with RosterClient(endpoints.listen) as client:
            deadline = time.monotonic() + timeout_s
            while True:
                for process in (self._runner, self._scheduler):
                    if process is not None and process.returncode is not None:
                        raise NoService(f"the {process.name} ended: {' | '.join(process.tail)}")
                try:
                    await client.get_model(deadline_s=2)
                    break
                except UnavailableError:
                    if time.monotonic() > deadline:
                        raise NoService("the service is not ready") from None
                    await asyncio.sleep(0.05)
        self.ready_s = self.ready_s or time.monotonic() - self._started_s

    async def load(self, name: str, flags: Sequence[str], profile_s: float = 0.0) -> ClientRecord:
        """Runs the client process with these flags; with `profile_s`, also records the runner's kernels."""
        record = self._folder / f"{name}.npz"
        command = [sys.executable, "-m", "bench.gpu_serving.client", f"--address={self._endpoints.listen}"]
        client = await ChildProcess.start("client", [*command, f"--record={record}", *flags], _print)
        try:
            if profile_s:
                await self._profile(profile_s)
            if await client.wait() != 0:
                raise RuntimeError(f"the client failed: {' | '.join(client.tail)}")
        finally:
            await client.stop(1.0)
        return ClientRecord.load(record)

    async def draft_right(self, share: float) -> None:
        """Makes the runner's drafter right with this probability."""
        if self._runner is None:
            raise RuntimeError("the runner was never started")
        (self._folder / "steps.npz").with_suffix(RIGHT).write_text(str(share))
        os.kill(self._runner.pid, signal.SIGUSR2)
        await asyncio.sleep(0.05)

    def kernels(self) -> tuple[np.ndarray, list[str]]:
        """Returns each kernel's begin and end in µs, [K, 2], and name, from the last profile, if there is one."""
        if not (self._folder / "kernels.npz").exists():
            return np.zeros((0, 2)), []
        with np.load(self._folder / "kernels.npz") as arrays:
            return arrays["times_us"], arrays["names"].tolist()

    def steps(self) -> StepRecord:
        """Reads the record of all steps; call it after the service has ended."""
        return StepRecord.load(self._folder / "steps.npz")

    async def _profile(self, seconds: float) -> None:
        if self._runner is None:
            raise RuntimeError("the runner was never started")
        await asyncio.sleep(2.0)
        os.kill(self._runner.pid, signal.SIGUSR1)
        await asyncio.sleep(seconds)
        os.kill(self._runner.pid, signal.SIGUSR1)

    async def _stop_scheduler(self) -> None:
        if self._scheduler is not None:
            await self._scheduler.stop(5.0)
            self._scheduler = None


def parameters(**values: object) -> str:
    """Returns policy parameters as JSON for the setting, without those that are None."""
    return json.dumps({name: value for name, value in values.items() if value is not None})


def _print(name: str, line: str) -> None:
    print(f"{name:>9} | {line[:200]}", flush=True)
