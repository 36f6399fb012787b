"""All moves of one engine, as the engine's other parts see them."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.link.links import Runners
from scheduler_svc.link.runner_events import GotMoved
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.moves.move_counts import MoveCounts
from scheduler_svc.moves.move_targets import MoveTargets, can_move
from scheduler_svc.moves.moving_out import MovingOut
from scheduler_svc.moves.prefix_moves import PrefixMoves
from scheduler_svc.moves.rebalancing import Rebalancing
from scheduler_svc.moves.role_moves import RoleMoves
from scheduler_svc.moves.sequence_moves import SequenceMoves
from scheduler_svc.moves.transfers import Transfers
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.placement import Placement
from scheduler_svc.runners.runner_pool import RunnerPool


class Moves:
    """Transfers, moves of sequences, and the uses that begin them. Costs nothing while no runner takes part."""

    def __init__(
        self,
        requests: Requests,
        pool: RunnerPool,
        runners: Runners,
        placement: Placement,
        finish_drain: Callable[[int], None],
    ) -> None:
        """`finish_drain` is called with the session of a leaving runner that has given its sequences away."""
        self._pool = pool
        self.counts = MoveCounts()
        self.transfers = Transfers(pool, runners, requests.ledger, self.counts)
        self.sequences = SequenceMoves(requests, pool, self.transfers, self.counts)
        targets = MoveTargets(pool, placement, self.transfers)
        self._moving_out = MovingOut(pool, placement, self.sequences, targets, finish_drain)
        self._roles = RoleMoves(requests, pool, placement, self.sequences, targets)
        self._rebalancing = Rebalancing(pool, placement, self.sequences, targets, requests.ledger)
        self.prefixes = PrefixMoves(requests, pool, placement, self.transfers, self.counts)
        placement.fetch = self.prefixes.fetch
        self._taking_part = 0
        """Number of runners that blocks can move from and to."""

    def joined(self, session: int) -> None:
        """Notes a runner that has joined."""
        self._taking_part += can_move(self._pool.schedulers[session].hello)

    def leaves(self, session: int) -> bool:
        """Begins to move the sequences of a runner that is about to leave; returns False if none can take them."""
        return self._moving_out.begin(session)

    def lost(self, session: int) -> None:
        """Ends what the loss of a runner ends. Its sequences were queued before."""
        self._taking_part = sum(can_move(scheduler.hello) for scheduler in self._pool.schedulers.values())
        self._moving_out.lost(session)
        self.transfers.lost(session)
        self.sequences.lost(session)

    def take(self, event: GotMoved) -> None:
        """Handles a runner's answer to a grant or a pull."""
        self.transfers.take(event)

    def advance(self) -> None:
        """Takes all moves as far as they go in this turn, and begins new ones."""
        if not self._taking_part:
            return
        self.transfers.advance()
        self.sequences.advance()
        self._moving_out.advance()
        self._roles.advance()
        self._rebalancing.advance()
        self.prefixes.advance()

    def flush(self) -> None:
        """Keeps what the moves under way copy out of the prefix caches."""
        self.sequences.flush()
        self.prefixes.flush()

    def rank_anew(self, rank: Callable[[Sequence], None]) -> None:
        """Calls `rank` with each sequence that waits for a move."""
        self.sequences.rank_anew(rank)
        self.prefixes.rank_anew(rank)

    def started(self, sequence: Sequence) -> None:
        """Notes a sequence that a plan has seated."""
        self.sequences.started(sequence)
