"""What one rank's process does: it loads its part of the model once, and serves with the others, again and again.

Rank 0 has the link to the scheduler; the others follow it. When the group is given up, the process keeps its weights,
kernels and measured choices, drops its KV, and comes for the next epoch.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import structlog
import zmq

from roster_common.curve_keys import UnusableKey
from roster_common.logs import configure_logs
from roster_common.setting_sources import UnusableSettings
from roster_protos import plan_pb2
from runner_svc.arithmetic.instruction_set import pin
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.runner import told
from runner_svc.group.follower import Follower
from runner_svc.group.member import Member, Place, prepare_environment
from runner_svc.group.node import Node
from runner_svc.group.rank_copier import RankCopier
from runner_svc.group.rank_runner import LeadingRunner, RankRunner
from runner_svc.interface.backend import Backend
from runner_svc.interface.ranks import RankLost, Regrouping, Shard
from runner_svc.launch.starting import (
    BROKEN,
    GC_THRESHOLD,
    SWITCH_INTERVAL_S,
    UNUSABLE,
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
from runner_svc.link.health import RunnerHealth
from runner_svc.link.plan_socket import PlanSocket
from runner_svc.model.errors import ModelNotFound, UnsupportedModel
from runner_svc.nodes.likeness import kind_of
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.device_choice import BrokenGpu, choose_device
from runner_svc.startup.host_pool import build_copier
from runner_svc.startup.start_times import StartTimes
from runner_svc.tiers.kv_copier import KVCopier

if TYPE_CHECKING:
    from runner_svc.group.forming import Group

_BEATS = 20
"""Heartbeats in the time after which a silent rank is ended."""
_FORMING_S = 10.0
_STEP_COSTS = "step-costs"
"""File with what rank 0 has measured, for the one that replaces it."""

log = structlog.get_logger()


def serve_forked(settings: RunnerSettings, place: Place) -> int:
    """Runs a fork of the launcher's warm process as a rank, until it ends; returns the exit status."""
    configure_rank_logs(settings, place)
    return serve_rank(settings, place, StartTimes(already_s=0.0))


def configure_rank_logs(settings: RunnerSettings, place: Place) -> None:
    """Configures logs once for all ranks: rank 0 reports what happens, the others only what is wrong."""
    quiet = place.rank > 0 and settings.log_level == "info"
    configure_logs(settings.log_format, "warning" if quiet else settings.log_level)


def serve_rank(settings: RunnerSettings, place: Place, times: StartTimes | None = None) -> int:
    """Runs this process as a rank of its launcher's group, until it ends; returns the exit status.

    `times`: what the start took so far; default: since the process began.
    Why settings can't be used is on the board: the launcher prints it once for all ranks.
    """
    end_with(place.launcher, signal.SIGKILL)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # The others end after rank 0's last record, or are killed. Ignored signals would be so in their children too.
    on_stop(leave_at_once if place.rank == 0 else _go_on)
    member = Member(Shard(place.rank, place.size), place.page, node=Node(place.size, place.node, place.nodes))
    _Heart(member, settings.rank_timeout_s / _BEATS).start()
    try:
        process = RankProcess(settings, member, place, times or StartTimes())
        return process.run()
    except (UnusableSettings, UnusableKey, ModelNotFound, UnsupportedModel) as error:
        why = str(error)
    except zmq.ZMQError as error:
        why = f"link is {settings.link!r}, which is not a usable ZeroMQ endpoint: {error}"
    except BrokenGpu as error:
        member.board.explain(place.rank, str(error))
        return BROKEN
    except Exception as error:  # its status must not be that of a runner that the scheduler rejects
        log.exception("a rank failed", rank=place.rank)
        member.board.explain(place.rank, told(error))
        return BROKEN
    member.board.explain(place.rank, why)
    return UNUSABLE


def _go_on(number: int, frame: FrameType | None) -> None:
    pass


class _Heart(threading.Thread):
    """Notes on the board, again and again, that this process runs."""

    def __init__(self, member: Member, interval_s: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._member, self._interval_s = member, interval_s

    def run(self) -> None:
        pause = threading.Event()
        while not pause.wait(self._interval_s):
            self._member.board.beat(self._member.shard.rank)


class RankProcess:
    """A rank with its loaded backend, which outlives each epoch."""

    def __init__(self, settings: RunnerSettings, member: Member, place: Place, times: StartTimes) -> None:
        """Loads the rank's part of the model. Raises what `load_backend` and `build_copier` raise."""
        self._settings, self._member, self._folder = settings, member, Path(place.folder)
        self._leads = member.shard.rank == 0
        self._health = RunnerHealth.open(settings.health_listen if self._leads else "")
        self._curve = read_curve(settings)
        times.begin("choosing the device")
        if settings.deterministic:
            pin()  # before torch is imported
        self._group, store = _group(settings, member, place)
        self._choice = choose_device(settings)
        if self._choice.device != "cuda" or settings.profile == "quiet":
            member.ring.poll_s = 0.0  # a CPU's ranks compute on all cores
        if self._leads:
            self._choice.tell()
        self._group.use(on_gpu=self._choice.device == "cuda" and settings.all_reduce == "nccl")
        self._backend: Backend = load_backend(settings, self._choice.device, times, self._group)
        self._copier: KVCopier | None = build_copier(settings, self._backend, times)
        if place.nodes > 1:
            member.board.describe(place.rank, kind_of(self._backend), store)
        self._step_costs: list[plan_pb2.StepCost] | None = None
        self._heard = plan_pb2.Hello()
        if self._choice.device != "hash" and self._leads:
            log.info("started", **times.fields())
        gc.collect()
        gc.freeze()  # what exists now lives until the end: collections, also those between epochs, need not scan it
        gc.set_threshold(GC_THRESHOLD, 20, 20)

    def run(self) -> int:
        """Serves in one epoch after the other; returns the exit status."""
        while True:
            epoch = self._member.gather()
            copier = RankCopier(self._member, self._copier) if self._copier is not None else None
            runner: RankRunner | None = None
            try:
                self._form(epoch)
                kind = LeadingRunner if self._leads else RankRunner
                name = self._settings.runner_id or "runner"
                runner = kind(self._member, self._backend, name, copier=copier, role=self._settings.role)
                return self._lead(runner) if isinstance(runner, LeadingRunner) else self._follow(runner)
            except RankLost as error:
                self._group.abort()
                why = self._member.learn_why(str(error))
                if runner is not None and runner.broken:
                    return BROKEN
                if self._leads:
                    log.warning("the group is given up, and forms again", epoch=epoch, reason=why)
            finally:
                if copier is not None:
                    copier.close()
            runner = copier = None
            gc.collect()  # what belonged to the epoch, while the others come

    def _abort_when_given_up(self, epoch: int) -> None:
        """Ends the exchanges of an epoch once any process has given it up."""
        self._member.board.wait(lambda: self._member.board.given_up >= epoch)
        if self._member.epoch == epoch:
            self._group.abort()

    def _form(self, epoch: int) -> None:
        """Forms the group, and has the backend begin with it. Raises RankLost."""
        backend = self._backend
        if self._group.needs_abort:
            threading.Thread(target=self._abort_when_given_up, args=(epoch,), name="abort", daemon=True).start()
        self._group.form(epoch)
        if self._leads:
            for path in self._folder.glob("epoch-*"):
                if path.name != f"epoch-{epoch}":
                    path.unlink(missing_ok=True)
        if isinstance(backend, Regrouping):
            backend.regroup()
        backend.num_blocks = self._group.least(backend.num_blocks)

    def _follow(self, runner: RankRunner) -> int:
        Follower(self._member, runner).run()
        return 0

    def _lead(self, runner: LeadingRunner) -> int:
        """Serves the scheduler. Raises RankLost unless the runner is to stop anyway."""
        settings = self._settings
        self._measure(runner)
        link = PlanSocket(runner, settings.link, settings.silence_s, self._curve, settings.plan_timeout_s)
        link.remember(self._heard)
        equip(link, settings, self._health, None)

        def finish(number: int, frame: FrameType | None) -> None:
            link.stop()

        on_stop(finish)
        log.info(
            "ready",
            runner_id=runner.runner_id,
            **described(self._backend, self._choice),
            ranks=self._member.shard.size,
            epoch=self._member.epoch,
            link=settings.link,
        )
        try:
            status = run_link(link, settings.plan_timeout_s)
            if status == 0:
                runner.stop()
            return status
        except (RankLost, PlanFault):
            on_stop(leave_at_once)  # first: the link would not hear of a signal any more
            if link.is_stopping:
                return 0
            raise RankLost(self._member.lost) from None
        finally:
            self._health.tell(False)
            self._heard = link.heard
            on_stop(leave_at_once)

    def _measure(self, runner: LeadingRunner) -> None:
        """Measures steps, unless this process has, or the former rank 0 did."""
        if self._step_costs is not None:
            runner.step_costs = self._step_costs
            return
        found = self._folder / _STEP_COSTS
        try:
            if found.exists():
                runner.step_costs = list(plan_pb2.Hello.FromString(found.read_bytes()).step_costs)
            else:
                measure(runner, self._choice.device, getattr(self._backend, "kept_timings", None))
        except PlanFault as fault:
            raise RankLost(str(fault)) from fault
        if runner.lost:
            raise RankLost(runner.lost)
        self._step_costs = runner.step_costs
        if runner.step_costs and not found.exists():
            written = found.with_suffix(".new")
            written.write_bytes(plan_pb2.Hello(step_costs=runner.step_costs).SerializeToString())
            written.rename(found)


def _group(settings: RunnerSettings, member: Member, place: Place) -> tuple[Group, str]:
    """Returns the group, and the address at which this rank serves its store to other hosts; '' if it does not."""
    prepare_environment()  # before torch is imported
    from runner_svc.group.forming import Group, store_between_hosts, store_in

    find_store, store = store_in(Path(place.folder), place.size), ""
    if place.nodes > 1:
        find_store, store = store_between_hosts(place.address, member.board, place.rank)
    group = Group(
        member.shard,
        find_store,
        address=place.address,
        timeout_s=settings.plan_timeout_s / 2,  # before rank 0, or the scheduler, takes the whole runner for hung
        forming_s=min(_FORMING_S, settings.rank_timeout_s / 2),  # before the launcher kills what is late
        given_up=lambda: member.lost,
    )
    return group, store
