"""The steps of a runner's start and its serving, which a runner of one process and rank 0 of a group have in common."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

import structlog

from roster_common.setting_sources import UnusableSettings
from runner_svc.execution.runner import Runner
from runner_svc.interface.backend import Backend
from runner_svc.interface.ranks import Communicator
from runner_svc.link.curve import CurveClient
from runner_svc.link.health import RunnerHealth
from runner_svc.link.plan_socket import BrokenBackend, HungBackend, PlanSocket, Rejected
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.backend_factory import build_backend
from runner_svc.startup.device_choice import DeviceChoice
from runner_svc.startup.loading_progress import LoadingProgress
from runner_svc.startup.start_times import StartTimes
from runner_svc.startup.step_costs import keep_step_costs, kept_step_costs, measured_step_costs, warm_up
from runner_svc.timings.timings_file import TimingsFile
from runner_svc.transfer.mover import Mover

REJECTED, UNUSABLE, BROKEN = 1, 2, 3
"""Exit statuses."""
SWITCH_INTERVAL_S = 0.0002
"""Bounds the delay until the socket's thread gets the interpreter to send a result while the next plan is prepared."""
GC_THRESHOLD = 20_000
"""Objects between collections. A step creates a few hundred, nearly none of them in cycles."""

log = structlog.get_logger()


def on_stop(handle: Callable[[int, FrameType | None], None]) -> None:
    """Sets what handles the signals that stop a service."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


def read_curve(settings: RunnerSettings) -> CurveClient | None:
    """Returns the keys that encrypt the link; None without. Raises UnusableKey."""
    if settings.runner_key is None or settings.scheduler_key is None:
        return None
    return CurveClient.read(settings.runner_key, settings.scheduler_key)


def load_backend(
    settings: RunnerSettings, device: str, times: StartTimes, ranks: Communicator | None = None
) -> Backend:
    """Loads the model, or one rank's part of it.

    Raises what `build_backend` raises, UnusableSettings also for a file that can't be used.
    """
    try:
        times.begin("preparing")
        with LoadingProgress() as progress:
            return build_backend(settings, device, times.watching(progress), ranks)
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        raise UnusableSettings(
            f"{error.filename} can't be used ({error.strerror}): check its path and owner"
        ) from error


def measure(runner: Runner, device: str, kept: TimingsFile | None) -> None:
    """Measures the runner's steps, unless an earlier start did or it computes with a test backend."""
    if device not in ("cpu", "cuda"):
        return
    began_at = time.monotonic()
    known = kept_step_costs(kept.timings) if kept is not None else []
    if known:
        warm_up(runner)
    runner.step_costs = known or measured_step_costs(runner, on_gpu=device == "cuda")
    if kept is not None:
        keep_step_costs(kept.timings, runner.step_costs)
        kept.keep()
    seconds = round(time.monotonic() - began_at, 2)
    if not runner.step_costs:
        log.info("measured no steps: the scheduler learns their times from results", seconds=seconds)
        return
    rows = [cost for cost in runner.step_costs if cost.decode_rows == 1 and not cost.prompt_positions]
    decode = {"decode_ms": round(rows[0].step_ns / 1e6, 3)} if rows else {}
    told = "steps were measured at an earlier start" if known else "measured the steps"
    log.info(told, seconds=seconds, steps=len(runner.step_costs), **decode)


def equip(link: PlanSocket, settings: RunnerSettings, health: RunnerHealth, mover: Mover | None) -> None:
    """Has the link tell of its state, and take part in moves if there is a `mover`."""
    link.answers.on_change = health.tell
    link.sleeps = settings.profile == "quiet"
    if mover is not None:
        link.take_part_in_moves(mover, settings.move_out_s)


def described(backend: Backend, choice: DeviceChoice) -> dict[str, object]:
    """Returns what a log line says of a backend that is ready."""
    drafter = getattr(backend, "drafter_name", "")
    return {
        "model": backend.model.name,
        "decoder": backend.model.decoder or "none",
        "device": backend.device,
        **choice.why,
        "slots": backend.num_slots,
        "blocks": backend.num_blocks,
        "block_size": backend.block_size,
        "kv_tokens": backend.num_blocks * backend.block_size,
        "context_length": backend.model.context_length,
        **({"numerics": backend.model.numerics} if backend.model.numerics else {}),
        **({"draft": drafter, "max_drafts": getattr(backend, "max_drafts", 0)} if drafter else {}),
    }


def run_link(link: PlanSocket, plan_timeout_s: float) -> int:
    """Executes plans until `stop` or an error; returns the exit status."""
    try:
        link.run()
    except Rejected as rejection:
        log.error("the scheduler rejected this runner", reason=str(rejection))
        return REJECTED
    except HungBackend:
        log.error("a plan did not finish in time: restart this runner", seconds=plan_timeout_s)
        return BROKEN
    except BrokenBackend:
        log.error("this process can no longer use the device: restart this runner")
        return BROKEN
    log.info("stopped")
    return 0


def complain(text: str, status: int = UNUSABLE) -> int:
    """Prints why the settings can't be used; returns the exit status."""
    print(f"roster-runner: {text}", file=sys.stderr)
    return status


def leave_at_once(number: int, frame: FrameType | None) -> None:
    """Handles a signal while no plan has been received yet."""
    sys.exit(0)  # no plan has been received yet
