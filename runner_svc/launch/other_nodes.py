"""The launchers of a group's other hosts, as that of this one sees them; with one host there are none."""

from __future__ import annotations

from dataclasses import replace

from runner_svc.group.member import Place
from runner_svc.group.node import Node
from runner_svc.launch.starting import BROKEN
from runner_svc.nodes.messages import End
from runner_svc.nodes.opening import Meeting, meet
from runner_svc.settings.runner_settings import RunnerSettings


class OtherNodes:
    """Talks to them between `start` and `close`."""

    def __init__(self, settings: RunnerSettings, page: int) -> None:
        """`page`: descriptor of the group's memory. Raises UnusableSettings and UnusableKey."""
        self.node = Node(settings.tensor_parallel, settings.node_rank, settings.nnodes)
        self._meeting: Meeting | None = None if self.node.is_alone else meet(settings, page, self.node)

    def start(self) -> None:
        """Begins to talk, from threads."""
        if self._meeting is not None:
            self._meeting.link.start()

    def close(self, status: int | None, why: str) -> None:
        """Says that this launcher ends, with what status and why; None: by an error of its own."""
        if self._meeting is not None:
            self._meeting.link.close(BROKEN if status is None else status, why)

    @property
    def verdict(self) -> End | None:
        """With what status this launcher has to end, and why: node 0 has ended the group, or refuses this node."""
        return self._meeting.link.verdict if self._meeting is not None else None

    def placed(self, place: Place) -> Place:
        """Returns the place of a rank with what it needs to find those of other nodes."""
        if self._meeting is None:
            return place
        return replace(place, node=self.node.number, nodes=self.node.count, address=self._meeting.address)
