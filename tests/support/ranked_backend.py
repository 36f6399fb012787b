"""A model divided among ranks, each a `TorchBackend` in a thread, as one backend: every step compares the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from roster_protos import plan_pb2
from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.group.forming import Group, store_in
from runner_svc.interface.backend import SlotChanges
from runner_svc.interface.ranks import Communicator, Shard
from runner_svc.interface.step import MaskedDraw, MaskedRows, StepBatch, StepOutput
from tests.support.host_backend import no_progress
from tests.support.thread_ranks import ThreadCommunicator, ThreadGroup


class RankedBackend:
    """Implements `runner_svc.interface.backend.SlotBackend`. What it does not have is that of the first rank."""

    def __init__(self, size: int, make: Callable[[Communicator], TorchBackend], store: Path | None = None) -> None:
        """`make` makes a rank's backend. `store`: a new folder, for exchanges over gloo in place of a list."""
        self.group = ThreadGroup(size)
        self.communicators: list[Any] = [self._communicator(rank, store) for rank in range(size)]
        self.ranks = self.group.each(lambda rank: make(self.communicators[rank]))
        self.group.each(lambda rank: self.communicators[rank].form())
        first = self.ranks[0]
        self.model, self.device, self.tile_tokens = first.model, first.device, first.tile_tokens
        self.block_size, self.num_blocks, self.num_slots = first.block_size, first.num_blocks, first.num_slots
        self.max_step_tokens, self.max_drafts, self.drafter_name = (
            first.max_step_tokens,
            first.max_drafts,
            first.drafter_name,
        )
        self.fingerprints = first.fingerprints

    def _communicator(self, rank: int, store: Path | None) -> ThreadCommunicator | Group:
        if store is None:
            return ThreadCommunicator(self.group, rank)
        store.mkdir(exist_ok=True, parents=True)
        return Group(Shard(rank, self.group.size), store_in(store, self.group.size))

    @classmethod
    def load(cls, folder: Path, size: int, *, store: Path | None = None, **arguments: Any) -> RankedBackend:
        """Returns the model of a folder divided among ranks; `arguments` are those of `TorchBackend.load`."""
        of_all = {"cache_folder": folder / "unused", "progress": no_progress, **arguments}
        return cls(size, lambda ranks: TorchBackend.load(str(folder), ranks=ranks, **of_all), store)

    @property
    def cache_regions(self) -> list[NDArray[np.uint8]]:
        """Those of all ranks, which copy the same blocks."""
        return [region for rank in self.ranks for region in rank.cache_regions]

    def forget_drafts(self, blocks: NDArray[np.int32]) -> None:
        for rank in self.ranks:
            rank.forget_drafts(blocks)

    @property
    def cache(self) -> _Caches:
        """Those of all ranks, to be poisoned."""
        return _Caches(_Together([rank.cache.data for rank in self.ranks]))

    def change_slots(self, changes: SlotChanges) -> None:
        self.group.each(lambda rank: self.ranks[rank].change_slots(changes))

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        self.group.each(lambda rank: self.ranks[rank].copy_blocks(sources, targets))

    def is_broken_by(self, error: Exception) -> bool:
        return False

    def step(self, batch: StepBatch) -> StepOutput:
        return self._one(self.group.each(lambda rank: self.ranks[rank].step(batch)))

    def _one(self, outputs: list[StepOutput]) -> StepOutput:
        """Returns the first rank's output; the others have the same bits."""
        first = outputs[0]
        for other in outputs[1:]:
            assert _content(other) == _content(first), "ranks differ"
        masked = [each.masked_rows for each in outputs]
        if masked[0] is not None:
            first.masked_rows = self._masked(masked)
        return first

    def _masked(self, rows: list[MaskedRows | None]) -> MaskedRows:
        def draw(masks: NDArray[np.uint32], gone: NDArray[np.bool_]) -> StepOutput:
            def drawn(rank: int) -> StepOutput:
                own = rows[rank]
                assert own is not None, "ranks differ in what waits for masks"
                return own.sample(masks, gone).wait()

            return self._one(self.group.each(drawn))

        return MaskedDraw(draw)


class _Together:
    """Tensors that are filled together."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.device = tensors[0].device

    def fill_(self, value: float) -> None:
        for tensor in self._tensors:
            tensor.fill_(value)

    def __getitem__(self, places: Any) -> _Together:
        return _Together([tensor[places] for tensor in self._tensors])


class _Caches:
    """What tests touch of the ranks' caches."""

    def __init__(self, data: _Together) -> None:
        self.data = data


def _content(output: StepOutput) -> tuple[object, ...]:
    def texts(rows: list[plan_pb2.RowLogprobs]) -> list[bytes]:
        return [row.SerializeToString(deterministic=True) for row in rows]

    return (
        output.statuses.tolist(),
        output.token_counts.tolist(),
        output.tokens.tolist(),
        output.drafted.tolist(),
        texts(output.logprobs),
        texts(output.prompt_logprobs),
    )
