"""Shows what the ranks of other nodes have noted on this node's board, and finds what its own ranks have noted.

A rank sees those of other nodes come for an epoch only after all ranks of its own node have come and the launcher has
emptied the ring. So no rank reads the ring of an earlier epoch, and the launcher, which writes or reads it for other
nodes, never touches it while ranks of a new epoch do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from runner_svc.group.board import Board, row_ready
from runner_svc.group.node import Node
from runner_svc.nodes.messages import State


class Mirror:
    """This node's board and what was heard of others. One thread uses it."""

    def __init__(self, board: Board, node: Node) -> None:
        self.board, self.node = board, node
        self.prepared = 0
        """The last epoch for which all of the node's ranks had come and the ring was emptied."""
        self._heard: dict[int, bytes] = {}
        self._given_up, self._why = 0, ""
        self.passed_on = (0, 0)
        """The epoch and number of the last record that was sent to other nodes."""

    # ------------------------------------------------------------------ of other nodes

    def hear(self, state: State, ranks: Iterable[int]) -> list[int]:
        """Takes over what another launcher said of `ranks`, the ones that it may speak for; returns other ranks of
        which it spoke."""
        allowed = frozenset(ranks)
        self._heard.update({rank: row for rank, row in state.rows.items() if rank in allowed})
        if state.given_up > self._given_up:
            self._given_up, self._why = state.given_up, state.why
        return sorted(state.rows.keys() - allowed)

    def forget(self, ranks: Iterable[int], why: str) -> None:
        """Notes that ranks are gone with their node, and ends the epoch that one of them has come for."""
        rows = [row for rank in ranks if (row := self._heard.pop(rank, None)) is not None]
        if epoch := max(map(row_ready, rows), default=0):
            self.board.give_up(epoch, why)

    def heard(self, rank: int) -> bytes | None:
        """Returns the last row of another node's rank; None while it is gone."""
        return self._heard.get(rank)

    def show(self) -> None:
        """Brings the board up to date."""
        board = self.board
        if self._given_up > board.given_up:
            board.give_up(self._given_up, self._why)
        for rank in self.node.others:
            row = self._heard.get(rank)
            ready = row_ready(row) if row is not None else 0
            shown = ready if ready == self.prepared else 0
            if row is not None:
                board.show(rank, row, shown)
            elif board.ready(rank):
                board.come(rank, 0)

    # ------------------------------------------------------------------ of this node

    @property
    def may_prepare(self) -> bool:
        """Whether all of the node's ranks have come for an epoch for which the ring was not emptied yet."""
        board = self.board
        epoch = board.epoch
        return epoch != self.prepared and all(board.ready(rank) == epoch for rank in self.node.ranks)

    def own_rows(self) -> dict[int, bytes]:
        """Returns what the node's ranks have noted."""
        return {rank: self.board.row(rank) for rank in self.node.ranks}

    def state(self, rows: Mapping[int, bytes]) -> State:
        """Returns the message with `rows`."""
        given_up = self.board.given_up
        return State(given_up, self.board.why_given_up(given_up) if given_up else "", rows, self.passed_on)


class News:
    """What one other launcher does not know yet."""

    def __init__(self) -> None:
        self._told: dict[int, bytes] = {}
        self._given_up = 0

    def of(self, mirror: Mirror, rows: Mapping[int, bytes], everything: bool) -> State | None:
        """Returns what to tell of `rows`; None if nothing has changed, unless `everything` is wanted."""
        changed = rows if everything else {rank: row for rank, row in rows.items() if self._told.get(rank) != row}
        state = mirror.state(changed)
        if not everything and not changed and state.given_up == self._given_up:
            return None
        self._told.update(changed)
        self._given_up = state.given_up
        return state
