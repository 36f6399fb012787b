"""Starts the ranks of a group as processes of this host, starts lost ones again, and ends them all.

A rank is lost when its process ends, when its heartbeat is silent for `rank_timeout_s`, or when it has not left an
epoch that long after the others did: it is killed then, so that it never computes with a group that it no longer
belongs to. The launcher imports neither torch nor a model. It has ranks forked (see warm.py), or starts new processes.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

import structlog

from runner_svc.group.board import Board
from runner_svc.group.member import VARIABLE, Place, own_gpu_first
from runner_svc.group.shared_page import attach, create
from runner_svc.launch.fitness import has_gpus
from runner_svc.launch.forking import ServeRank
from runner_svc.launch.other_nodes import OtherNodes
from runner_svc.launch.rank import serve_forked
from runner_svc.launch.rank_child import ForkedRank, NewRank, RankChild
from runner_svc.launch.starting import REJECTED, UNUSABLE, complain, on_stop
from runner_svc.launch.store_folder import StoreFolder
from runner_svc.launch.warm import Warm, end, reap_orphans
from runner_svc.settings.rank_settings import threads_of_a_rank
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.runner_name import default_name

_TICK_S = 0.05
_LOADING_SILENCE_S = 60.0
"""Least time for which a rank that loads may be silent: one call of a library may hold the interpreter for long."""
_IMPORTING_S, _FORKING_S = 300.0, 10.0
"""Seconds in which a rank must be forked, by a warm process that still imports libraries, and by one that has."""
_LONGEST_DELAY_S = 30.0
_STOP_S = 5.0
"""Seconds in which the other ranks end after rank 0."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Rank:
    """One rank's process and what the launcher has seen of it."""

    process: RankChild | None = None
    is_told: bool = False  # whether the log has its process id
    start_at: float = 0.0  # when to start it, while there is no process
    started_at: float = 0.0
    has_loaded: bool = False
    failures: int = 0  # ends in a row before it came for an epoch
    beat_ns: int = 0
    silent_s: float = 0.0
    late_s: float = 0.0  # since the epoch ended that it has not left
    is_drained: bool = False


class Launcher:
    """Supervises the ranks of one runner. `run` needs the main thread."""

    def __init__(
        self, settings: RunnerSettings, command: list[str] | None = None, serve: ServeRank = serve_forked
    ) -> None:
        """`command`: starts a rank; default: this program with its arguments. `serve`: what a forked rank runs."""
        self._settings = settings
        safe = [] if os.getcwd() in sys.path else ["-P"]  # a rank imports from where this process does
        self._command = command or [sys.executable, *safe, "-m", "runner_svc.main", *sys.argv[1:]]
        self._size = settings.tensor_parallel
        self._page = create()
        self._board = Board(attach(self._page), self._size)
        self._warm: Warm | None = None
        if settings.fork_ranks == "on":
            on_gpus = settings.device in ("auto", "cuda") and has_gpus()
            self._warm = Warm(settings, serve, self._page, on_gpus, self._command)
            self._warm.start()  # before this process has threads
        self._others = OtherNodes(settings, self._page)
        self._ranks = {rank: _Rank() for rank in self._others.node.ranks}
        self._signals: list[int] = []
        self._stopping = False
        self._why = ""  # all ranks are ended
        self._looked_at = time.monotonic()

    def run(self) -> int:
        """Serves until a signal, or until rank 0 or the settings end the runner; returns the exit status."""
        wake, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        on_stop(self._note)
        name = self._settings.runner_id or default_name(self._settings.cache_dir)
        status: int | None = None
        try:
            with StoreFolder() as folder:
                self._others.start()
                try:
                    while status is None:
                        status = self._turn(wake, folder, name)
                    return status
                finally:
                    self._end_all()
                    self._others.close(status, self._why)
        finally:
            signal.set_wakeup_fd(-1)
            os.close(wake)
            os.close(write_end)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _turn(self, wake: int, folder: StoreFolder, name: str) -> int | None:
        """Starts what is due, sleeps until something happens, and handles it; returns the exit status, if it ends."""
        for rank, state in self._ranks.items():
            if state.process is None and not state.is_drained and time.monotonic() >= state.start_at:
                self._start(rank, folder, name)
        self._sleep(wake)
        with suppress(BlockingIOError):
            os.read(wake, 64)
        while self._signals:
            self._signals.pop()
            if not self._forward_stop():
                return 0
        for rank, state in self._ranks.items():
            if state.process is None:
                continue
            ended = state.process.poll()
            self._tell(rank, state.process.pid)
            if ended is not None and (status := self._ended(rank, ended)) is not None:
                return status
        self._look_at_warm()
        self._look()
        return self._hear_other_nodes()

    def _hear_other_nodes(self) -> int | None:
        """Returns the exit status if node 0 has ended the group, or has refused this node."""
        for rank, state in self._ranks.items():
            if state.is_drained and self._board.ready(rank) <= self._board.given_up:
                state.is_drained = self._stopping  # rank 0 was lost after it had told this one to end
        verdict = self._others.verdict
        if verdict is not None and verdict.status:
            return complain(verdict.why, verdict.status)
        self._stopping |= verdict is not None
        return 0 if verdict is not None else None

    def _sleep(self, wake: int) -> None:
        """Sleeps until something happens, at most for one tick."""
        descriptors = [wake, *(state.process.fileno() for state in self._ranks.values() if state.process is not None)]
        if self._warm is not None:
            descriptors += self._warm.filenos()
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        poll.poll(_TICK_S * 1000)

    # ------------------------------------------------------------------ processes

    def _start(self, rank: int, folder: StoreFolder, name: str) -> None:
        folder.keep()
        place = self._others.placed(Place(rank, self._size, os.getpid(), self._page, str(folder.path)))
        self._board.start(rank)
        state = self._ranks[rank]
        state.process = self._forked(place, name) if self._forks() else self._new(place, name)
        state.is_told = False
        state.silent_s = state.late_s = 0.0
        state.started_at, state.has_loaded = time.monotonic(), False
        self._tell(rank, state.process.pid)

    def _tell(self, rank: int, pid: int) -> None:
        """Logs a rank's process id, once it is known."""
        if pid and not self._ranks[rank].is_told:
            self._ranks[rank].is_told = True
            self._board.beat(rank)
            log.info("started a rank", rank=rank, pid=pid)

    def _new(self, place: Place, name: str) -> NewRank:
        threads = str(threads_of_a_rank(self._settings))
        own = {VARIABLE: place.text(), "ROSTER_RUNNER_ID": name, "ROSTER_THREADS": threads}
        return NewRank(self._command, {**os.environ, **own, **self._own_gpu(place.rank)}, self._page)

    def _forks(self) -> bool:
        """Whether ranks are forked; starts the process that does it, if it has ended."""
        if self._warm is None:
            return False
        self._warm.start()
        return not self._warm.is_unfit

    def _forked(self, place: Place, name: str) -> ForkedRank:
        assert self._warm is not None
        own = {"runner_id": name, "threads": threads_of_a_rank(self._settings)}
        settings = self._settings.model_copy(update=own)
        return self._warm.fork(settings, place, self._own_gpu(place.rank))

    def _own_gpu(self, rank: int) -> dict[str, str]:
        """Returns the variable that makes a rank's GPU its first."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if self._settings.device in ("cpu", "hash") or visible == "":
            return {}
        return {"CUDA_VISIBLE_DEVICES": own_gpu_first(rank - min(self._ranks), len(self._ranks), visible)}

    def _ended(self, rank: int, status: int) -> int | None:
        """Handles the end of a rank's process; returns the exit status if all end with it."""
        state, board = self._ranks[rank], self._board
        assert state.process is not None
        child, state.process = state.process, None
        pid = child.pid
        child.close()
        if status == UNUSABLE:
            self._why = board.explanation(rank) or f"rank {rank} can't be used with these settings"
            return complain(self._why)
        if rank == 0 and status in (0, REJECTED):
            return status
        if status == 0:
            # Rank 0 has told it to end, and ends too, unless it was lost after that, which may be seen before.
            state.is_drained = self._stopping or board.ready(rank) > board.given_up
            return None
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        explained = board.explanation(rank)
        why = f"rank {rank} (pid {pid}) {how}{': ' if explained else ''}{explained}"
        ready = board.ready(rank)
        if ready > board.given_up:
            board.give_up(ready, why)
        board.come(rank, 0)
        if self._stopping:
            state.is_drained = True
            return 0 if rank == 0 else None
        for other in self._ranks.values():
            other.is_drained = False  # rank 0 was lost after it had ended the others
        state.failures = 0 if ready else state.failures + 1
        delay_s = min(_LONGEST_DELAY_S, 2.0 ** (state.failures - 2)) if state.failures else 0.0
        state.start_at = time.monotonic() + delay_s
        log.warning("a rank is lost, and starts again", rank=rank, pid=pid, how=how, reason=why, delay_s=delay_s)
        return None

    # ------------------------------------------------------------------ silence

    def _look(self) -> None:
        """Kills ranks that are silent, or that have not left an epoch. A pause of this process counts as one tick."""
        now = time.monotonic()
        tick_s, self._looked_at = min(2 * _TICK_S, now - self._looked_at), now
        limit_s, board = self._settings.rank_timeout_s, self._board
        for rank, state in self._ranks.items():
            if state.process is None:
                continue
            if not state.process.pid:
                state.silent_s += tick_s
                is_ready = self._warm is not None and self._warm.is_ready
                if state.silent_s > (max(limit_s, _FORKING_S) if is_ready else _IMPORTING_S):
                    self._kill(rank, state, f"was not forked for {state.silent_s:.1f} s")
                continue
            ready = board.ready(rank)
            if ready and not state.has_loaded:
                state.has_loaded = True
                log.info("a rank has loaded", rank=rank, seconds=round(now - state.started_at, 3))
            beat_ns = board.beat_ns(rank)
            state.silent_s = state.silent_s + tick_s if beat_ns == state.beat_ns else 0.0
            state.beat_ns = beat_ns
            state.late_s = state.late_s + tick_s if 0 < ready <= board.given_up else 0.0
            if state.silent_s > (limit_s if ready else max(limit_s, _LOADING_SILENCE_S)):
                self._kill(rank, state, f"was silent for {state.silent_s:.1f} s")
            elif state.late_s > limit_s:
                self._kill(rank, state, f"computed for {state.late_s:.1f} s after its group was given up")

    def _kill(self, rank: int, state: _Rank, why: str) -> None:
        assert state.process is not None
        told = f"rank {rank} (pid {state.process.pid}) {why}"
        ready = self._board.ready(rank)
        if ready > self._board.given_up:
            self._board.give_up(ready, told)
        log.warning("a rank is killed", rank=rank, pid=state.process.pid, reason=why)
        state.silent_s = state.late_s = 0.0
        if not state.process.pid and self._warm is not None:
            self._warm.kill()
        state.process.kill()

    def _look_at_warm(self) -> None:
        """Sees to it that the warm process runs, and buries orphans.

        The launcher becomes their parent, as it has been with a warm process, or as the first process of a container.
        """
        children: list[RankChild] = [state.process for state in self._ranks.values() if state.process is not None]
        known = set()
        if self._warm is not None:
            self._warm.look()
            if self._board.is_complete and not self._stopping:
                self._warm.keep_spare()
            if self._warm.is_unfit:
                self._warm.close()  # with the spare of an earlier one
                self._warm = None
            else:
                children += self._warm.spares
                known.add(self._warm.pid)
        if all(child.pid for child in children):
            reap_orphans(known | {child.pid for child in children})

    # ------------------------------------------------------------------ the end

    def _forward_stop(self) -> bool:
        """Has rank 0 drain; returns False if it does not run, or not here."""
        self._stopping = True
        process = self._ranks[0].process if 0 in self._ranks else None
        if process is None or not process.pid:
            return False
        process.terminate()
        return True

    def _end_all(self) -> None:
        """Ends all ranks: they have a moment if rank 0 has served, and so told them to end."""
        until_at = time.monotonic() + (_STOP_S if self._stopping and self._board.is_complete else 0.0)
        if self._warm is not None:
            self._warm.close()
        for state in self._ranks.values():
            if state.process is None:
                continue
            state.process.wait(max(0.0, until_at - time.monotonic()))
            end(state.process)
            state.process = None
