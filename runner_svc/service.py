"""The runner service: loads a model, connects to the scheduler, and executes plans until SIGTERM or Ctrl-C.

Exit status: 0 after a signal, 1 if the scheduler rejected the runner, 2 for settings that can't be used, 3 if this
process can no longer use the device (for example after a CUDA error or a step that never ends) and must be restarted.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import structlog
import zmq

from roster_common.curve_keys import UnusableKey
from roster_common.extras import lacks
from roster_common.logs import configure_logs, warn_unknown
from roster_common.service_command import read_command_line
from roster_common.setting_sources import UnusableSettings
from runner_svc.arithmetic.instruction_set import pin
from runner_svc.execution.runner import Runner
from runner_svc.group.member import Place
from runner_svc.launch.forking import fork_if_asked
from runner_svc.launch.launcher import Launcher
from runner_svc.launch.rank import configure_rank_logs, serve_forked, serve_rank
from runner_svc.launch.ray_launcher import PARENT_VARIABLE, RayLauncher, Resources
from runner_svc.launch.starting import (
    BROKEN,
    GC_THRESHOLD,
    SWITCH_INTERVAL_S,
    complain,
    described,
    equip,
    leave_at_once,
    load_backend,
    measure,
    on_stop,
    read_curve,
    run_link,
)
from runner_svc.launch.with_parent import end_with
from runner_svc.link.curve import CurveClient
from runner_svc.link.health import RunnerHealth
from runner_svc.link.plan_socket import PlanSocket
from runner_svc.model.errors import ModelNotFound, UnsupportedModel
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.device_choice import BrokenGpu, choose_device
from runner_svc.startup.host_pool import build_copier
from runner_svc.startup.moves import make_mover
from runner_svc.startup.runner_name import default_name
from runner_svc.startup.start_times import StartTimes
from runner_svc.startup.versions import versions

_ABOUT = "Loads a model and computes the scheduler's plans, until SIGTERM or Ctrl-C."

log = structlog.get_logger()


def run() -> NoReturn:
    """Serves as flags, environment and file say until a signal ends it, then exits with the status."""
    try:
        settings = read_command_line(RunnerSettings, "roster-runner", _ABOUT, versions)
    except UnusableSettings as error:
        sys.exit(complain(str(error)))
    place = Place.of_environment()
    try:
        if place is not None:
            configure_rank_logs(settings, place)
            status = serve_rank(settings, place)
        else:
            configure_logs(settings.log_format, settings.log_level)
            fork_if_asked(settings, serve_forked)
            warn_unknown()
            status = _launch(settings)
    except SystemExit:
        _exit_now(0)  # an ordinary exit would wait for a download
    if status == BROKEN:
        _exit_now(status)  # an ordinary exit would wait for the device
    sys.exit(status)


def _launch(settings: RunnerSettings) -> int:
    """Serves with as many processes as the settings say; returns the exit status."""
    if settings.launcher == "ray":
        return _launch_with_ray(settings)
    if os.environ.pop(PARENT_VARIABLE, None) is not None:
        end_with(None, signal.SIGTERM)
    if settings.tensor_parallel == 1:
        return serve(settings)
    on_stop(leave_at_once)  # it may wait for the name of node 0, and process 1 has no default for a signal
    try:
        return Launcher(settings).run()
    except (UnusableSettings, UnusableKey) as error:  # of the meeting of several hosts
        return complain(str(error))


def _launch_with_ray(settings: RunnerSettings) -> int:
    if reason := lacks("ray"):
        return complain(reason)
    from runner_svc.launch.ray_cluster import RayCluster

    try:
        cluster = RayCluster(settings.groups, Resources.of(settings))
    except UnusableSettings as error:
        return complain(str(error))
    try:
        return RayLauncher(settings, cluster).run()
    finally:
        cluster.close()


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
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    on_stop(leave_at_once)
    try:
        health = RunnerHealth.open(settings.health_listen)
        curve = read_curve(settings)  # before loading the model, to report a wrong path at once
        name = settings.runner_id or default_name(settings.cache_dir)  # before the model: other runners may start
        times.begin("choosing the device")
        if settings.deterministic:
            pin()  # before torch is imported
        choice = choose_device(settings)
        choice.tell()
        backend = load_backend(settings, choice.device, times)
        runner = Runner(backend, name, copier=build_copier(settings, backend, times), role=settings.role)
        times.begin("measuring steps")
        measure(runner, choice.device, getattr(backend, "kept_timings", None))
        times.begin("connecting")
        mover = make_mover(settings, backend, curve)
        link = make_link(runner, settings.link, settings.silence_s, curve, settings.plan_timeout_s)
        equip(link, settings, health, mover)
    except (UnusableSettings, UnusableKey, ModelNotFound, UnsupportedModel) as error:
        return complain(str(error))
    except zmq.ZMQError as error:
        return complain(f"link is {settings.link!r}, which is not a usable ZeroMQ endpoint: {error}")
    except BrokenGpu as error:
        complain(str(error))
        return BROKEN

    def finish(number: int, frame: FrameType | None) -> None:
        link.stop()

    on_stop(finish)
    if choice.device in ("cpu", "cuda"):
        log.info("started", **times.fields())
    log.info("ready", runner_id=runner.runner_id, **described(backend, choice), link=settings.link)
    gc.collect()
    gc.freeze()  # objects that exist now live until the end: collections need not scan them
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    try:
        return run_link(link, settings.plan_timeout_s)
    finally:
        health.close()
