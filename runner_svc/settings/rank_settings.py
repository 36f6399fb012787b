"""Which settings a group of ranks can't be used with."""

from __future__ import annotations

import os
from ipaddress import ip_address
from pathlib import Path
from typing import Protocol

from roster_common.endpoints import is_loopback_host, split_address


class RankSettings(Protocol):
    """The settings that matter to a group."""

    @property
    def tensor_parallel(self) -> int: ...
    @property
    def nnodes(self) -> int: ...
    @property
    def node_rank(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def rdzv_endpoint(self) -> str: ...
    @property
    def runner_key(self) -> Path | None: ...
    @property
    def all_reduce(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def decoder(self) -> str: ...
    @property
    def move_listen(self) -> str: ...
    @property
    def launcher(self) -> str: ...
    @property
    def groups(self) -> int: ...
    @property
    def health_listen(self) -> str: ...


def threads_of_a_rank(settings: RankSettings) -> int:
    """Returns the number of threads: without a setting, all ranks of this host together use each core once."""
    ranks_here = settings.tensor_parallel // settings.nnodes
    return settings.threads or max(1, len(os.sched_getaffinity(0)) // ranks_here)


def check_ranks(settings: RankSettings) -> None:
    """Raises ValueError, with one sentence, for settings that don't go together."""
    size = settings.tensor_parallel
    _check_launcher(settings)
    _check_nodes(settings)
    if size == 1:
        return
    if settings.device == "null":
        raise ValueError(
            f"tensor_parallel is {size}, but the test backend 'null' has nothing to divide: set tensor_parallel to 1"
        )
    if settings.decoder == "transformers":
        raise ValueError(
            f"tensor_parallel is {size}, but decoder is 'transformers', whose layers can't be divided: set "
            "tensor_parallel to 1, or decoder to 'roster'"
        )
    if settings.move_listen:
        raise ValueError(
            f"tensor_parallel is {size}, but move_listen is {settings.move_listen!r}: the KV of a sequence lies on all "
            "ranks and can't move, so leave move_listen out"
        )


def _check_nodes(settings: RankSettings) -> None:
    nodes, size = settings.nnodes, settings.tensor_parallel
    if nodes == 1:
        for name, unset in (("node_rank", 0), ("rdzv_endpoint", "")):
            if (value := getattr(settings, name)) != unset:
                raise ValueError(
                    f"{name} is {value!r}, but nnodes is 1, so all ranks are on this host: leave {name} out, or set "
                    "nnodes to the number of hosts"
                )
        return
    if size % nodes:
        raise ValueError(
            f"tensor_parallel is {size}, which {nodes} nodes can't share equally: set it to a multiple of nnodes"
        )
    if settings.node_rank >= nodes:
        raise ValueError(
            f"node_rank is {settings.node_rank}, but nnodes is {nodes}: number the nodes from 0 to {nodes - 1}"
        )
    if not settings.rdzv_endpoint:
        raise ValueError(
            f"nnodes is {nodes}, but rdzv_endpoint is not set: set it to the address of node 0 on all nodes, such as "
            "node0.example:29500"
        )
    if settings.all_reduce == "one-shot":
        raise ValueError(
            f"nnodes is {nodes}, but all_reduce is 'one-shot', which adds up in memory that GPUs of one host share: "
            "set all_reduce to 'nccl'"
        )
    if settings.launcher == "ray":
        raise ValueError(
            f"nnodes is {nodes}, but launcher is 'ray', which places each group on one node: set nnodes to 1, or "
            "launcher to 'local'"
        )
    _check_meeting(settings)


def _check_meeting(settings: RankSettings) -> None:
    endpoint = settings.rdzv_endpoint
    host, port = split_address(endpoint, "node0.example:29500")
    if not port or _is_wildcard(host):
        raise ValueError(
            f"rdzv_endpoint is {endpoint!r}, which other nodes can't dial: state the address and port of node 0"
        )
    if settings.runner_key is None and not is_loopback_host(host):
        raise ValueError(
            f"rdzv_endpoint is {endpoint!r}, which other machines reach: set runner_key and scheduler_key, the same "
            "runner_key on all nodes, which encrypt what launchers say"
        )


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:
        return host == "*"


def _check_launcher(settings: RankSettings) -> None:
    if settings.launcher == "local" and settings.groups > 1:
        raise ValueError(
            f"groups is {settings.groups}, but launcher is 'local', which starts one: set groups to 1, or launcher to "
            "'ray'"
        )
    for name in ("move_listen", "health_listen"):
        if settings.groups > 1 and getattr(settings, name):
            raise ValueError(
                f"groups is {settings.groups}, but {name} is {getattr(settings, name)!r}, which can't be the address "
                f"of several runners: leave {name} out"
            )
