"""A connection to a host that is gone is given up, and a link that fails ends its launcher."""

from __future__ import annotations

import socket
import threading

import zmq

from runner_svc.nodes.spoke import Spoke
from tests.support.link_proxies import TcpProxy
from tests.support.linked_nodes import LinkedNodes, eventually


class Fails(Spoke):
    """Fails, once it is welcome."""

    def _turn(self, elapsed_s: float, beats: bool) -> None:
        super()._turn(elapsed_s, beats)
        if self._is_welcome:
            raise ValueError("a mistake of ours")


def test_a_link_that_fails_ends_its_launcher() -> None:
    with LinkedNodes(2, 2, spoke=Fails) as linked:
        link = linked.nodes.pop(1).link
        eventually(lambda: link.verdict)
        assert link.verdict is not None and link.verdict.status == 3
        closing = threading.Thread(target=link.close, args=(3,), daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()


class Strands(TcpProxy):
    """Can leave its connections without another end, as those to a host that has lost its power are."""

    def strand(self, port: int) -> None:
        """New connections go to another port."""
        with self._lock:
            self.stranded: list[socket.socket] = list(self._pairs)
            for end in self.stranded:
                self._selector.unregister(end)
            self._pairs.clear()
            self._target_port = port


def test_a_node_that_asks_a_host_without_power_asks_again_where_the_name_leads() -> None:
    with LinkedNodes(2, 2, timeout_s=0.2) as linked, zmq.Context() as context, context.socket(zmq.ROUTER) as mute:
        linked.close(1)
        hub = int(linked.endpoint.rpartition(":")[2])
        with Strands(mute.bind_to_random_port("tcp://127.0.0.1")) as proxy:
            linked.endpoint = proxy.endpoint
            spoke = linked.open(1).link
            assert isinstance(spoke, Spoke) and mute.recv_multipart()
            proxy.strand(hub)
            eventually(lambda: spoke._is_welcome)
            linked.close(1)
