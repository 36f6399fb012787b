"""Node 0 keeps a node's number for it while it speaks, and gives it to another launcher once it does not."""

from __future__ import annotations

import threading

import pytest

from runner_svc.nodes import hub
from runner_svc.nodes.spoke import Spoke
from tests.support.linked_nodes import LinkedNodes, eventually


class Freezes(Spoke):
    """Says and hears nothing while `frozen`."""

    frozen = False

    def _turn(self, elapsed_s: float, beats: bool) -> None:
        if not self.frozen:
            super()._turn(elapsed_s, beats)


def test_a_number_that_is_taken_is_refused_also_by_a_launcher_of_the_same_name() -> None:
    """Launchers in containers are process 1 of hosts that may have one name."""
    with LinkedNodes(4, 2, timeout_s=2.0) as linked:
        linked.gather()
        first = linked.nodes.pop(1)
        second = linked.open(1)
        eventually(lambda: second.link.verdict)
        assert second.link.verdict is not None
        assert "takes part already: give each node its own node_rank" in second.link.verdict.why
        assert first.link.verdict is None and not linked.nodes[0].members[0].lost
        linked.nodes[2] = first


def test_a_launcher_that_asked_long_ago_costs_the_next_one_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_CONTEST_S", 0.1)
    with LinkedNodes(2, 2, timeout_s=1.0, spoke=Freezes) as linked:
        linked.gather()
        first, link = linked.nodes.pop(1), linked.nodes[0].link
        linked.open(1)
        assert isinstance(link, hub.Hub) and isinstance(first.link, Freezes)
        eventually(lambda: link._peers[1].rivals)
        linked.close(1)
        threading.Event().wait(0.3)
        first.link.frozen = True
        second = linked.open(1)
        assert isinstance(second.link, Spoke)
        eventually(lambda: second.link._is_welcome or second.link.verdict)  # type: ignore[attr-defined]
        assert second.link.verdict is None and "was silent for 1.0 s" in linked.members[0].lost
        linked.nodes[2] = first
