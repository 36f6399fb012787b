"""Moves of running sequences: each goes on decoding while its KV is copied, and pauses for the rest only.

| stage | the sequence | what is copied |
|---|---|---|
| AHEAD | runs at the source | full blocks below `computed`, in rounds |
| SETTLING | has left its slot; its rows in flight deliver their tokens | nothing, but the rest is granted |
| LAST | waits | the blocks that are left, the tail included |
| ARRIVED | waits for the target's next plan | nothing |

Until LAST is done, the sequence can go on from the source's blocks: it returns to its slot's runner or is queued, and
its named blocks are hit. Blocks that have arrived are named at the target when a move ends early, so that a sequence
that comes there later hits them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import structlog

from scheduler_svc.model.sequence import Phase, Sequence
from scheduler_svc.moves.move import Move, Stage
from scheduler_svc.moves.move_counts import MoveCounts, Use
from scheduler_svc.moves.transfers import Transfers
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.runner_pool import RunnerPool
from scheduler_svc.scheduler.arrivals import Arrival

SHORT_REST = 1
"""Full blocks left to copy, at most, at which the sequence stops."""
MOST_ROUNDS = 8
"""Copies ahead of the stop. Each leaves the blocks that were filled meanwhile, a few after the first."""
ROUND_BLOCKS = 64
"""Blocks of a prompt under way that are copied at once, at least."""
SPANS = ("settle_ms", "copy_ms", "wait_ms")
"""Of a move's pause: its rows in flight, the last copy, and until the target's next plan."""

log = structlog.get_logger()


class SequenceMoves:
    """The moves under way in one engine. A sequence has at most one."""

    def __init__(self, requests: Requests, pool: RunnerPool, transfers: Transfers, counts: MoveCounts) -> None:
        self._requests = requests
        self._pool = pool
        self._transfers = transfers
        self._counts = counts
        self._moves: dict[Sequence, Move] = {}
        self._stage_of: dict[Stage, Callable[[Move], None]] = {
            Stage.AHEAD: self._copy_ahead,
            Stage.SETTLING: self._settle,
            Stage.LAST: lambda move: None,
            Stage.ARRIVED: lambda move: None,
        }

    def __len__(self) -> int:
        return len(self._moves)

    def __iter__(self) -> Iterator[Move]:
        return iter(list(self._moves.values()))

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._moves

    def leaving(self, source: int) -> int:
        """Returns how many sequences are on their way from this runner and still need it."""
        return sum(move.source == source and move.stage is not Stage.ARRIVED for move in self._moves.values())

    # ------------------------------------------------------------------ the course of a move

    def begin(self, sequence: Sequence, source: int, target: int, use: Use) -> None:
        """Begins to move a sequence that runs at `source` and that `target` has room for."""
        here, there = self._pool.schedulers[source], self._pool.schedulers[target]
        hit = there.prefix.match(sequence).blocks
        move = Move(sequence, source, target, use, int(here.table.epoch[sequence.slot]), hit, len(hit))
        there.moves.hold(move.key, move.blocks)
        there.moves.expected += 1
        self._moves[sequence] = move
        self._counts.begun[use] += 1
        self._copy_ahead(move)

    def advance(self) -> None:
        """Takes every move as far as it can go now."""
        for move in self:
            if move.transfer is None or move.transfer.is_ahead:
                self._stage_of[move.stage](move)

    def _copy_ahead(self, move: Move) -> None:
        """Copies the next full blocks, or stops the sequence if few are left."""
        here, sequence = self._pool.schedulers[move.source], move.sequence
        slot = sequence.slot
        if sequence.scheduler is not here or here.table.epoch[slot] != move.epoch:
            self._give_up(move)  # it has been preempted
            return
        full = int(here.table.computed[slot]) // here.pool.block_size
        left = full - move.num_copied
        in_prompt = int(here.table.known[slot] - here.table.planned[slot]) > 1
        if in_prompt and move.use is Use.ROLE:
            if left >= ROUND_BLOCKS:
                self._copy(move, full)
        elif left > SHORT_REST and move.rounds < MOST_ROUNDS:
            self._copy(move, full)
        else:
            self._stop(move)

    def _copy(self, move: Move, end: int) -> None:
        """Copies the blocks up to index `end`; gives up if the target has no room for them."""
        if self._grow(move, end):
            move.rounds += 1
            self._transfer(move, end)
        else:
            self._give_up(move)

    def _transfer(self, move: Move, end: int, *, is_ahead: bool = False) -> None:
        """Begins the transfer of the blocks up to index `end`, for which the target has its own."""
        here, first = self._pool.schedulers[move.source], move.num_copied
        sources = here.moves.held.get(move.key, move.sequence.blocks)

        def ended(done: bool) -> None:
            transfer, move.transfer = move.transfer, None
            if done and transfer is not None and not transfer.is_ahead:
                move.num_copied = first + len(transfer.targets)
            self._copied(move, done)

        move.transfer = self._transfers.begin(
            move.source, move.target, sources[first:end], move.blocks[first:end], ended, is_ahead=is_ahead
        )

    def _grow(self, move: Move, count: int) -> bool:
        """Gives the move `count` blocks at the target; returns whether there are enough free ones."""
        there = self._pool.schedulers[move.target]
        missing = count - len(move.blocks)
        if missing > there.pool.num_free - there.admission.reserve:
            return False
        if missing > 0:
            move.blocks += there.pool.allocate(missing)  # `held` has the same list, so that it has these references
        return True

    def _copied(self, move: Move, done: bool) -> None:
        """Goes on after a transfer. The move may have ended meanwhile, or one of its runners may be lost."""
        if self._moves.get(move.sequence) is not move:
            return
        if not done:
            self._give_up(move)
        elif move.stage is Stage.LAST:
            self._arrive(move)

    def _stop(self, move: Move) -> None:
        """Takes the sequence out of its slot; its rows in flight still deliver their tokens. What is left to copy is
        granted meanwhile, which takes as long as a step."""
        here = self._pool.schedulers[move.source]
        move.stopped_at = self._requests.ledger.now_s
        move.computed = here.departures.detach(move.sequence, move.key)
        move.stage = Stage.SETTLING
        end = here.pool.blocks_for(move.computed)
        if move.sequence.stale and end > move.num_copied and self._grow(move, end):
            self._transfer(move, end, is_ahead=True)
        self._settle(move)

    def _settle(self, move: Move) -> None:
        """Copies what is left, once all tokens are known."""
        sequence, there = move.sequence, self._pool.schedulers[move.target]
        if sequence.stale:
            return
        move.settled_at = self._requests.ledger.now_s
        move.computed = min(move.computed, len(sequence.log) - 1)
        end = there.pool.blocks_for(move.computed)
        if not self._grow(move, there.pool.blocks_for(len(sequence.log))):
            self._give_up(move)
            return
        if end <= move.num_copied:
            self._withdraw(move)
            self._arrive(move)
            return
        move.stage = Stage.LAST
        if move.transfer is not None:
            self._transfers.pull(move.transfer, end - move.num_copied)
        else:
            self._copy(move, end)

    def _withdraw(self, move: Move) -> None:
        """Ends a transfer whose pull has not been asked for, if there is one."""
        transfer, move.transfer = move.transfer, None
        if transfer is not None and transfer.is_ahead:
            self._transfers.cancel(transfer)

    def _arrive(self, move: Move) -> None:
        """Hands the sequence to the target's next plan, and lets the source go."""
        there = self._pool.schedulers[move.target]
        self._release_source(move)
        move.stage, move.arrived_at = Stage.ARRIVED, self._requests.ledger.now_s
        there.moves.expected -= 1
        there.moves.arrivals.append(Arrival(move.sequence, move.key, move.blocks, move.computed, move.is_private))
        self._pool.wake(move.target)

    def started(self, sequence: Sequence) -> None:
        """Ends the move of a sequence that a plan has just seated at its target."""
        move = self._moves.get(sequence)
        if move is not None and move.stage is Stage.ARRIVED:
            del self._moves[sequence]
            self._counts.done[move.use] += 1
            now_s = self._requests.ledger.now_s
            self._counts.pauses_s += now_s - move.stopped_at
            times_s = (move.stopped_at, move.settled_at, move.arrived_at, now_s)
            spans = {name: round((e - b) * 1e3, 1) for name, b, e in zip(SPANS, times_s, times_s[1:], strict=False)}
            log.debug("moved a sequence", use=move.use.value, rounds=move.rounds, **spans)

    # ------------------------------------------------------------------ early ends

    def _give_up(self, move: Move) -> None:
        """Ends the move; a sequence that has stopped is queued. What has arrived is named at the target."""
        sequence = move.sequence
        there = self._pool.schedulers.get(move.target)
        if there is not None and not move.is_private:
            full = len(sequence.log) // there.pool.block_size
            there.prefix.keep_copied(sequence, move.blocks[: min(move.num_copied, full)])
        self._drop(move)
        if sequence.phase is Phase.WAITING and sequence.scheduler is None and move.stage is not Stage.AHEAD:
            self._requests.queue.push(sequence)

    def _drop(self, move: Move) -> None:
        """Forgets the move, and releases its blocks at both ends."""
        del self._moves[move.sequence]
        self._withdraw(move)
        self._release_source(move)
        there = self._pool.schedulers.get(move.target)
        if there is None or move.key not in there.moves.held:
            return
        if move.stage is Stage.ARRIVED:
            left = [arrival for arrival in there.moves.arrivals if arrival.key != move.key]
            there.moves.arrivals = deque(left)
        else:
            there.moves.expected -= 1
        there.let_go(move.key)

    def _release_source(self, move: Move) -> None:
        here = self._pool.schedulers.get(move.source)
        if here is not None and move.key in here.moves.held:
            here.let_go(move.key)

    def lost(self, session: int) -> None:
        """Ends the moves that the loss of a runner ends. `Scheduler.requeue_all` and `Transfers.lost` came before.

        A sequence whose last copy is under way may still arrive from a source that is lost.
        """
        for move in self:
            if session == move.target or (session == move.source and move.stage in (Stage.AHEAD, Stage.SETTLING)):
                self._give_up(move)

    # ------------------------------------------------------------------ as a place where sequences wait

    @property
    def num_waiting(self) -> int:
        """Number of sequences that have stopped and not arrived."""
        return sum(move.stage is not Stage.AHEAD and move.sequence.phase is Phase.WAITING for move in self)

    def discard(self, sequence: Sequence) -> None:
        """Ends the move of a waiting sequence that has ended, or that goes on elsewhere."""
        move = self._moves.get(sequence)
        if move is not None:
            self._drop(move)

    def flush(self) -> None:
        """Keeps what the moves under way copy out of the prefix caches."""
        for move in self:
            move.is_private = True

    def rank_anew(self, rank: Callable[[Sequence], None]) -> None:
        """Calls `rank` with each sequence that waits here."""
        for move in self:
            if move.stage is not Stage.AHEAD and move.sequence.phase is Phase.WAITING:
                rank(move.sequence)
