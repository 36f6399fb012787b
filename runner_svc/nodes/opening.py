"""Makes a launcher's link to the launchers of other nodes, as the settings say."""

from __future__ import annotations

import errno
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

import structlog
import zmq

from roster_common.curve_keys import read_pair
from roster_common.endpoints import is_loopback_host, split_address
from roster_common.setting_sources import UnusableSettings
from runner_svc.group.board import OTHER_NODES, Board
from runner_svc.group.node import Node
from runner_svc.group.plan_ring import PlanRing
from runner_svc.group.shared_page import attach
from runner_svc.nodes.addresses import EXAMPLE, facing, resolved, zmq_endpoint
from runner_svc.nodes.hub import Hub
from runner_svc.nodes.keys import GroupKeys
from runner_svc.nodes.likeness import facts
from runner_svc.nodes.mirror import Mirror
from runner_svc.nodes.node_link import LinkOptions, NodeLink
from runner_svc.nodes.spoke import Spoke
from runner_svc.settings.runner_settings import RunnerSettings

_PATIENCE_S = {errno.EADDRINUSE: 10.0, errno.EADDRNOTAVAIL: 60.0}
"""Until the launcher before has let go of the port, and until a cluster's names lead to this host's new address."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Meeting:
    """The link to other nodes, and the address that ranks need."""

    link: NodeLink
    address: str
    """This host's, for the other nodes."""


def meet(settings: RunnerSettings, page: int, node: Node) -> Meeting:
    """Opens this node's end of the link; `start` of the link begins to talk.

    `page`: descriptor of the launcher's shared memory. Raises UnusableSettings, and UnusableKey.
    """
    keys = GroupKeys(*read_pair(settings.runner_key)) if settings.runner_key is not None else None
    memory = attach(page)

    def open_link(endpoint: str) -> NodeLink:
        return link_of(memory, node, LinkOptions(endpoint, facts(settings), settings.rank_timeout_s), keys)

    if not node.number:
        return _listening(settings, open_link)
    try:
        address = facing(*resolved(settings.rdzv_endpoint))
    except OSError as error:
        raise UnusableSettings(
            f"rdzv_endpoint is {settings.rdzv_endpoint!r}, but no network leads there ({error}): check the address"
        ) from error
    return Meeting(open_link(f"tcp://{settings.rdzv_endpoint}"), address)  # a name may come to lead elsewhere


def link_of(
    memory: mmap.mmap, node: Node, options: LinkOptions, keys: GroupKeys | None, spoke: type[Spoke] = Spoke
) -> NodeLink:
    """Returns the node's end of the link, over the board and the ring in its launcher's `memory`.

    `spoke`: the class of ends other than node 0's. Raises zmq.ZMQError if node 0 can't listen at the endpoint.
    """

    def ring(given_up: Callable[[], str]) -> PlanRing:
        return PlanRing(memory, node.launchers_place, node.ring_places, given_up)

    board = Board(memory, node.size, OTHER_NODES)
    return (spoke if node.number else Hub)(Mirror(board, node), options, ring, keys)


def _check_reachable(endpoint: str, leader: str) -> None:
    """Raises UnusableSettings for a host's own name that leads to itself there, as /etc/hosts often has it."""
    if ip_address(leader.partition("%")[0]).is_loopback and not is_loopback_host(split_address(endpoint, EXAMPLE)[0]):
        raise UnusableSettings(
            f"rdzv_endpoint is {endpoint!r}, which leads to {leader} on node 0, where no other node reaches it: state "
            "its address in the network, or correct /etc/hosts"
        )


def _listening(settings: RunnerSettings, open_link: Callable[[str], NodeLink]) -> Meeting:
    began_at = time.monotonic()
    while True:
        leader, port = resolved(settings.rdzv_endpoint)
        _check_reachable(settings.rdzv_endpoint, leader)
        try:
            return Meeting(open_link(zmq_endpoint(leader, port)), leader)
        except zmq.ZMQError as error:
            if time.monotonic() - began_at >= _PATIENCE_S.get(error.errno or 0, 0.0):
                raise UnusableSettings(
                    f"rdzv_endpoint is {settings.rdzv_endpoint!r}, but node 0 can't listen there ({error}): state an "
                    "address of node 0 and a free port"
                ) from error
            log.warning("node 0 can't listen yet", address=leader, port=port, reason=str(error))
        time.sleep(1.0)
