"""Mask processes without processes: a `MaskServer` in this thread takes the frames and dies when a test says so."""

from __future__ import annotations

import functools
import itertools
import signal
from collections.abc import Callable
from typing import Any

import numpy as np

from roster_protos import plan_pb2
from scheduler_svc.constrained.background import Background
from scheduler_svc.constrained.constraints import Constraints
from scheduler_svc.constrained.mask_client import MaskClient
from scheduler_svc.constrained.mask_handle import Channel, Died, DiedBefore
from scheduler_svc.constrained.process.compiler import GrammarCompiler
from scheduler_svc.constrained.process.mask_server import MaskServer

Fate = Callable[[str, Channel, bytes], int | None]
"""Maps role, channel and frame to the exit status with which the process dies on the frame, or None if it answers."""


def lives(role: str, channel: Channel, body: bytes) -> int | None:
    """Lets the process answer every frame."""
    return None


def dies_once(role: str, after: int = 0, status: int = -signal.SIGKILL) -> Fate:
    """Makes the process of this role die once, on the frame that follows `after` others."""
    left = itertools.count(after, -1)

    def fate(asked: str, channel: Channel, body: bytes) -> int | None:
        return status if asked == role and next(left) == 0 else None

    return fate


class LocalHandle:
    """A stand-in for `MaskHandle`."""

    def __init__(self, role: str, model: plan_pb2.Model, fate: Fate = lives) -> None:
        self._role = role
        self._model = model
        self.fate = fate
        self._server: MaskServer | None = None
        self._memory = np.zeros(0, np.uint32)
        self._generation = 0
        self.deaths = 0

    def start(self) -> int:
        if self._server is None:
            compiler = _compiler(self._model.SerializeToString())  # shared: all tests have one vocabulary
            self._server = MaskServer(self._model, 1, lambda words: self._memory[:words], compiler)
            self._server.maker.forced_s = 60.0  # a run is found whole on a busy machine, too
            self._generation += 1
        return self._generation

    @property
    def running(self) -> int:
        return self._generation if self._server is not None else 0

    def ask(
        self,
        channel: Channel,
        generation: int,
        body: bytes,
        *,
        alone: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> bytes:
        if self._server is None or generation != self._generation:
            raise DiedBefore(-9)
        if meanwhile is not None:
            meanwhile()
        status = self.fate(self._role, channel, body)
        if status is not None:
            self._server = None
            self.deaths += 1
            raise Died(status)
        return self._server.grammar(body) if channel is Channel.GRAMMARS else self._server.masks(body)

    def reserve(self, num_bytes: int) -> None:
        if num_bytes > self._memory.nbytes:
            self._memory = np.zeros(num_bytes // 4, np.uint32)

    @property
    def memory(self) -> bytes:
        return self._memory.tobytes()

    def close(self) -> None:
        self._server = None


@functools.lru_cache(maxsize=4)
def _compiler(model: bytes) -> GrammarCompiler:
    return GrammarCompiler(plan_pb2.Model.FromString(model))


def local_client(model: plan_pb2.Model, threads: int, fate: Fate = lives) -> MaskClient:
    """Returns a client whose mask processes are in this thread."""
    return MaskClient(model.vocab_size, LocalHandle("grammars", model, fate), LocalHandle("masks", model, fate))


class Inline(Background):
    """Background work that is done at once, and collected as usual."""

    def run(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self._open += 1
        self._done.put((work(), then))


class Late(Inline):
    """The same, with outcomes that come late: `holds` says, before each one, whether it is not there yet."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        super().__init__()
        self._holds = holds

    def collect(self) -> None:
        while self._open and not self._holds():
            self._open -= 1
            outcome, then = self._done.get_nowait()
            then(outcome)


def work_inline(constraints: Constraints, fate: Fate = lives, holds: Callable[[], bool] = lambda: False) -> None:
    """Makes all compilation happen in the engine's own steps, so that runs are repeatable. `holds`: as of `Late`."""
    constraints.work_in(
        Inline(), Late(holds), lambda model, threads: local_client(model, threads, fate), clock=lambda: 0.0
    )
