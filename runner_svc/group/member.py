"""One rank's place in its group: how it comes for an epoch, and gives it up."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Self

from runner_svc.group.board import Board, of_rank
from runner_svc.group.node import Node
from runner_svc.group.plan_ring import PlanRing
from runner_svc.group.shared_page import attach
from runner_svc.interface.ranks import Shard

VARIABLE = "_ROSTER_RANK"
"""Variable in which the launcher passes a rank its place."""
_POLL_S = 0.02
"""More than a step of decoding takes: while plans come, ranks do not sleep."""
_VERDICT_S = 0.1


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank's process has from its launcher."""

    rank: int
    size: int
    launcher: int
    """Process id of the launcher, with which the rank ends."""
    page: int
    """Descriptor of the shared memory."""
    folder: str
    """Folder in which the ranks of one host find one another."""
    node: int = 0
    """The number of this host among those of the group."""
    nodes: int = 1
    address: str = ""
    """This host's address for the other nodes; '' without any."""

    def text(self) -> str:
        """Returns the place as the value of `VARIABLE`."""
        return json.dumps(asdict(self))

    @classmethod
    def of_environment(cls) -> Self | None:
        """Returns the place of this process; None if it is no rank."""
        text = os.environ.get(VARIABLE)
        return cls(**json.loads(text)) if text else None


def prepare_environment() -> None:
    """Sets what NCCL reads when torch is imported and when it starts, unless the operator has set it."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # the ranks abort, not torch's watchdog
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast over NVLink


def own_gpu_first(rank: int, size: int, visible: str | None = None) -> str:
    """Returns CUDA_VISIBLE_DEVICES for a rank: its own GPU, then those of the others, whose memory it reads.

    `visible`: the variable's value for all; None: not set.
    """
    gpus = visible.split(",") if visible else [str(number) for number in range(size)]
    first = rank % len(gpus)
    return ",".join(gpus[first:] + gpus[:first])


class Member:
    """Gathers with the other ranks of the same board, again and again."""

    def __init__(self, shard: Shard, page: int, num_processors: int | None = None, node: Node | None = None) -> None:
        """`page`: descriptor of the shared memory. `num_processors`: those that the ranks share; default: this one's.
        `node`: the host's place among several.

        Ranks poll for the next plan if each has a processor for itself and one is left.
        """
        memory = attach(page)
        processors = len(os.sched_getaffinity(0)) if num_processors is None else num_processors
        node = node or Node(shard.size)
        self.shard = shard
        self.board = Board(memory, shard.size, of_rank(shard.rank))
        self.ring = PlanRing(
            memory,
            node.ring_place(shard.rank),
            node.ring_places,
            lambda: self.lost,
            _POLL_S if processors > node.num_ranks else 0.0,
        )
        self._empties_ring = shard.rank == 0 and node.is_alone
        self.epoch = 0
        """The epoch for which this rank has come last."""

    @property
    def lost(self) -> str:
        """Why the epoch was given up; '' while it was not."""
        return self.board.why_given_up(self.epoch)

    def gather(self) -> int:
        """Waits until all ranks have come for one epoch, and returns its number.

        No rank uses the ring then. Rank 0 empties it here, before it forms the group, and no other rank reads before
        the group has formed. With several nodes their launchers do so, before the ranks see those of other nodes come.
        """
        board, rank = self.board, self.shard.rank
        while True:
            self.epoch = board.epoch
            board.begin_epoch(rank)
            self.ring.begin()
            board.come(rank, self.epoch)
            board.wait(lambda: board.is_complete or board.given_up >= self.epoch)
            if not self.lost:
                if self._empties_ring:
                    self.ring.restart()
                return self.epoch

    def give_up(self, why: str) -> None:
        """Ends the epoch for every rank, because of this one."""
        self.board.give_up(self.epoch, why)

    def learn_why(self, guess: str) -> str:
        """Returns why another rank is lost, and ends the epoch for every rank.

        The launcher, which sees processes end, names the rank; `guess` counts if it does not within a moment.
        """
        until_at = time.monotonic() + _VERDICT_S
        self.board.wait(lambda: bool(self.lost) or time.monotonic() > until_at)
        self.board.give_up(self.epoch, guess)
        return self.lost
