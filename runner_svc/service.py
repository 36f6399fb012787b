"""The runner service: loads a model, connects to the scheduler, and executes plans until SIGTERM or Ctrl-C.

Exit status: 0 after a signal, 1 if the scheduler rejected the runner, 2 for settings that can't be used, 3 if this
process can no longer use the device (for example after a CUDA error or a step that never ends) and must be restarted.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import structlog
import zmq

from roster_common.curve_keys import UnusableKey
from roster_common.logs import configure_logs, warn_unknown
from roster_common.service_command import read_command_line
from roster_common.setting_sources import UnusableSettings
from runner_svc.arithmetic.instruction_set import pin
from runner_svc.execution.runner import Runner
from runner_svc.interface.backend import Backend
from runner_svc.link.curve import CurveClient
from runner_svc.link.health import RunnerHealth
from runner_svc.link.plan_socket import BrokenBackend, HungBackend, PlanSocket, Rejected
from runner_svc.model.errors import ModelNotFound, UnsupportedModel
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.backend_factory import build_backend
from runner_svc.startup.device_choice import BrokenGpu, DeviceChoice, choose_device
from runner_svc.startup.host_pool import build_copier
from runner_svc.startup.loading_progress import LoadingProgress
from runner_svc.startup.moves import make_mover
from runner_svc.startup.runner_name import default_name
from runner_svc.startup.start_times import StartTimes
from runner_svc.startup.step_costs import keep_step_costs, kept_step_costs, measured_step_costs, warm_up
from runner_svc.startup.versions import versions
from runner_svc.timings.timings_file import TimingsFile
from runner_svc.transfer.mover import Mover

# Bounds the delay until the socket's thread gets the interpreter to send a result while the next plan is prepared.
_SWITCH_INTERVAL_S = 0.0002

# Objects between collections. A step creates a few hundred, nearly none of them in cycles.
_GC_THRESHOLD = 20_000

_BROKEN = 3
_ABOUT = "Loads a model and computes the scheduler's plans, until SIGTERM or Ctrl-C."

log = structlog.get_logger()


def run() -> NoReturn:
    """Serves as flags, environment and file say until a signal ends it, then exits with the status."""
    try:
        settings = read_command_line(RunnerSettings, "roster-runner", _ABOUT, versions)
    except UnusableSettings as error:
        sys.exit(_complain(str(error)))
    configure_logs(settings.log_format, settings.log_level)
    warn_unknown()
    try:
        status = serve(settings)
    except SystemExit:
        _exit_now(0)  # an ordinary exit would wait for a download
    if status == _BROKEN:
        _exit_now(status)  # an ordinary exit would wait for the device
    sys.exit(status)


def _exit_now(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


MakeLink = Callable[[Runner, str, float, CurveClient | None, float], PlanSocket]


def serve(settings: RunnerSettings, make_link: MakeLink = PlanSocket) -> int:
    """Runs the service until a signal; returns the exit status. Must run in the main thread.

    `make_link` makes the socket from the runner, the endpoint, `silence_s`, the keys and `plan_timeout_s`; benchmarks
    substitute a socket that measures times.
    """
    times = StartTimes()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave_at_once)
    try:
        health = RunnerHealth.open(settings.health_listen)
        curve = _curve(settings)  # before loading the model, to report a wrong path at once
        name = settings.runner_id or default_name(settings.cache_dir)  # before the model: other runners may start
        times.begin("choosing the device")
        if settings.deterministic:
            pin()  # before torch is imported
        choice = choose_device(settings)
        choice.tell()
        backend = _backend(settings, choice.device, times)
        runner = Runner(backend, name, copier=build_copier(settings, backend, times), role=settings.role)
        times.begin("measuring steps")
        _measure(runner, choice.device, getattr(backend, "kept_timings", None))
        times.begin("connecting")
        mover = make_mover(settings, backend, curve)
        link = make_link(runner, settings.link, settings.silence_s, curve, settings.plan_timeout_s)
        _equip(link, settings, health, mover)
    except (UnusableSettings, UnusableKey, ModelNotFound, UnsupportedModel) as error:
        return _complain(str(error))
    except zmq.ZMQError as error:
        return _complain(f"link is {settings.link!r}, which is not a usable ZeroMQ endpoint: {error}")
    except BrokenGpu as error:
        _complain(str(error))
        return _BROKEN

    def finish(number: int, frame: FrameType | None) -> None:
        link.stop()

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, finish)
    if choice.device in ("cpu", "cuda"):
        log.info("started", **times.fields())
    log.info("ready", runner_id=runner.runner_id, **_described(backend, choice), link=settings.link)
    gc.collect()
    gc.freeze()  # objects that exist now live until the end: collections need not scan them
    gc.set_threshold(_GC_THRESHOLD, 20, 20)
    try:
        return _run(link, settings.plan_timeout_s)
    finally:
        health.close()


def _equip(link: PlanSocket, settings: RunnerSettings, health: RunnerHealth, mover: Mover | None) -> None:
    link.answers.on_change = health.tell
    link.sleeps = settings.profile == "quiet"
    if mover is not None:
        link.take_part_in_moves(mover, settings.move_out_s)


def _described(backend: Backend, choice: DeviceChoice) -> dict[str, object]:
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


def _backend(settings: RunnerSettings, device: str, times: StartTimes) -> Backend:
    """Loads the model. Raises what `build_backend` raises, UnusableSettings also for a file that can't be used."""
    try:
        times.begin("preparing")
        with LoadingProgress() as progress:
            return build_backend(settings, device, times.watching(progress))
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        raise UnusableSettings(
            f"{error.filename} can't be used ({error.strerror}): check its path and owner"
        ) from error


def _measure(runner: Runner, device: str, kept: TimingsFile | None) -> None:
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


def _run(link: PlanSocket, plan_timeout_s: float) -> int:
    """Executes plans until `stop` or an error; returns the exit status."""
    try:
        link.run()
    except Rejected as rejection:
        log.error("the scheduler rejected this runner", reason=str(rejection))
        return 1
    except HungBackend:
        log.error("a plan did not finish in time: restart this runner", seconds=plan_timeout_s)
        return _BROKEN
    except BrokenBackend:
        log.error("this process can no longer use the device: restart this runner")
        return _BROKEN
    log.info("stopped")
    return 0


def _curve(settings: RunnerSettings) -> CurveClient | None:
    if settings.runner_key is None or settings.scheduler_key is None:
        return None
    return CurveClient.read(settings.runner_key, settings.scheduler_key)


def _leave_at_once(number: int, frame: FrameType | None) -> None:
    sys.exit(0)  # no plan has been received yet


def _complain(text: str) -> int:
    print(f"roster-runner: {text}", file=sys.stderr)
    return 2
