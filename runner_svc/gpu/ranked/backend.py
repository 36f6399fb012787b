"""A GPU backend that computes a rank's part of a model, with other ranks.

All ranks launch the same steps in the same order, so their graphs have the same sizes: those that rank 0 has measured,
alone and without exchanges, before the group forms. What needs all ranks is done in `regroup`.
"""

from __future__ import annotations

import copy
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import structlog
import torch
from torch import Tensor

from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.gpu.backend import CudaBackend
from runner_svc.gpu.graphs import StepGraphs
from runner_svc.gpu.ranked.agreement import agreed_timings
from runner_svc.interface.progress import Progress
from runner_svc.interface.ranks import Communicator, PeerCommunicator, RankLost
from runner_svc.timings.start_timings import StartTimings

log = structlog.get_logger()


def _no_progress(what: str, share: float) -> None:
    """Reports nothing: the group serves no request until all ranks are ready."""


class RankedCudaBackend(CudaBackend):
    """Implements `runner_svc.interface.backend.OverlappingBackend` and `runner_svc.interface.ranks.Regrouping`."""

    def __init__(self, *arguments: Any) -> None:
        """`arguments` are those of `CudaBackend`, with a decoder of ranks. `regroup` comes before the first step."""
        self._agreed: StartTimings | None = None  # those by which the graphs were captured
        self._has_grouped = False
        super().__init__(*arguments)
        if self._ranks.shard.size > 1:
            self.fingerprints["numerics"] += f" on {self._ranks.shard.size} ranks"
        self._ring = self._make_ring(self._check_ranks)

    @torch.inference_mode()
    def regroup(self) -> None:
        """Does what the ranks must do alike when their group has formed; nothing may be in flight. Raises RankLost."""
        ranks, began_at = self._ranks, time.monotonic()
        with self._device.stream():
            if isinstance(ranks, PeerCommunicator):
                ranks.open()
            self._has_grouped = True
            self.num_blocks = ranks.least(self.num_blocks)
            if self._sizes.fp8_cache and not self._states_scales:
                self._calibrate()
            captured = self._capture_alike()
            self._slots.words.zero_()
            self._steps.packed.zero_()
        self._changes = self._last_end = None
        self._ring = self._make_ring(self._check_ranks)
        self._device.synchronize()
        ranks.least(0)  # all are ready
        seconds = round(time.monotonic() - began_at, 2)
        log.info("the ranks agree on their steps", seconds=seconds, captured=captured, blocks=self.num_blocks)

    def is_broken_by(self, error: Exception) -> bool:
        """Returns whether this process can no longer compute; the end of another rank is none of that."""
        return not isinstance(error, RankLost) and super().is_broken_by(error)

    def _calibrate(self) -> None:
        scales = self._kv_scales(_no_progress)
        assert scales is not None and self.cache.scales is not None, "the group has formed, and the cache has scales"
        self.cache.scales.copy_(scales)

    def _capture_alike(self) -> bool:
        """Captures the graphs that rank 0's times choose, and returns True.

        Does nothing, and returns False, if there are such graphs, and they exchange with the ranks of any forming.
        """
        agreed = agreed_timings(self._ranks, self._timings, self._device.device)
        recording: AbstractContextManager[None] = nullcontext()
        if isinstance(self._ranks, PeerCommunicator):
            if agreed == self._agreed:
                return False
            recording = self._ranks.recording()
        self._graphs, self._mixed_graphs = StepGraphs([]), StepGraphs([])
        self._device.drop_graphs()
        with recording:
            captured = self._captured(_no_progress, copy.deepcopy(agreed), measures=False)
        self._graphs, self._mixed_graphs = captured
        self._agreed = agreed
        return True

    def _captured_at_start(self, progress: Progress) -> tuple[StepGraphs, StepGraphs]:
        """Returns no graphs; rank 0 measures by which times they will be captured."""
        if self._ranks.shard.rank == 0:
            self._captured(progress, self._timings)
        return StepGraphs([]), StepGraphs([])

    @property
    def _ranks(self) -> Communicator:
        """Those of the decoder. Raises TypeError for one that computes its model alone."""
        if not isinstance(self._decoder, CudaDecoder) or self._decoder.exchanges is None:
            raise TypeError("the decoder has no other ranks")
        return self._decoder.exchanges.ranks

    @property
    def _states_scales(self) -> bool:
        """Whether the checkpoint has the scales of an FP8 cache."""
        return isinstance(self._decoder, CudaDecoder) and self._decoder.kv_scales is not None

    def _kv_scales(self, progress: Progress) -> Tensor | None:
        if not self._has_grouped and not self._states_scales:
            return None  # it takes all ranks to compute keys
        return super()._kv_scales(progress)

    def _check_ranks(self) -> None:
        """Raises RankLost if the group was given up: a step that has ended may have no right result."""
        if why := self._ranks.given_up():
            raise RankLost(why)
