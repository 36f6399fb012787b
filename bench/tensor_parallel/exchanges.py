"""Times all-reduces of ranks by size: one launch over shared memory against NCCL, in CUDA graphs.

    python -m bench.tensor_parallel.exchanges --ranks 2 --output exchanges.json

For each size, a graph of 20 all-reduces in bfloat16 is replayed; the time of one is the median over replays, of the
slowest rank. Beside it is the bandwidth of a copy from one GPU's memory to another's, and the time that a ring's bytes,
2 (G - 1) / G of the size, take at that. Ranks have a GPU each; with ROSTER_TEST_RANKS_SHARE_A_GPU=1 they share one, to
try the command, without NCCL: times then say nothing.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common.gpu_timing import card, median_microseconds
from bench.common.on_gpu import require_gpu
from bench.common.provenance import provenance, write_results
from bench.tensor_parallel.processes import in_ranks, shares_gpu
from runner_svc.cuda.ranks.peer_ranks import PeerRanks
from runner_svc.gpu.ranks.placing import gpu_of, over_peer_memory
from runner_svc.group.forming import Group
from runner_svc.interface.ranks import Communicator

HIDDEN = 8192
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
LAUNCHES = 20
REPLAYS = 15
ONE_SHOT, NCCL = "one-shot", "nccl"


def times_of(group: Group, way: str, hidden: int, rows: list[int], launches: int) -> list[float]:
    """Returns microseconds of an all-reduce of each number of rows, on one rank."""
    device = gpu_of(group.shard)
    group.use(on_gpu=way == NCCL)
    group.form()
    ranks: Communicator = group
    found = []
    with device.stream():
        if way == ONE_SHOT:
            peers = over_peer_memory(group, device, torch.bfloat16)
            peers.open()
            ranks = peers
        for count in rows:
            x = torch.randn(count, hidden, device=device.device).bfloat16()
            sums = [torch.empty_like(x) for _ in range(launches)]

            def launch(x: torch.Tensor = x, sums: list[torch.Tensor] = sums) -> None:
                for each in sums:
                    each.copy_(x)
                    ranks.all_reduce(each)

            if isinstance(ranks, PeerRanks):
                with ranks.recording():
                    replay = device.capture(launch)
            else:
                replay = device.capture(launch)
            ranks.least(0)
            copies = device.capture(partial(_copy_all, x, sums))  # what else is in the graph
            both, alone = median_microseconds(replay, REPLAYS), median_microseconds(copies, REPLAYS)
            found.append(max(0.0, both - alone) / launches)
            ranks.least(0)
    return found


def _copy_all(x: torch.Tensor, sums: list[torch.Tensor]) -> None:
    for each in sums:
        each.copy_(x)


def peer_bandwidth() -> float:
    """Returns TB/s of a copy from GPU 0 to GPU 1, counting its bytes once; NaN with one GPU."""
    if torch.cuda.device_count() < 2:
        return float("nan")
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0").random_()
    target = torch.empty_like(source, device="cuda:1")
    return source.numel() / median_microseconds(lambda: target.copy_(source)) / 1e6


def measured(size: int, ways: list[str], hidden: int, rows: list[int], launches: int) -> list[dict[str, Any]]:
    """Returns a line for each number of rows, with the slowest rank's microseconds of each way."""
    by_way = {way: in_ranks(size, times_of, way, hidden, rows, launches, timeout_s=180.0) for way in ways}
    return [
        {
            "rows": count,
            "bytes": count * hidden * 2,
            **{way: max(times[place] for times in ranks) for way, ranks in by_way.items()},
        }
        for place, count in enumerate(rows)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=HIDDEN, help=f"elements of a row (default: {HIDDEN})")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--launches", type=int, default=LAUNCHES, help=f"all-reduces of a graph (default: {LAUNCHES})")
    parser.add_argument("--ways", nargs="+", choices=(ONE_SHOT, NCCL), default=[ONE_SHOT, NCCL])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    require_gpu()
    ways = [way for way in arguments.ways if not (shares_gpu() and way == NCCL)]
    source = provenance("bench.tensor_parallel.exchanges", ["torch", "cupy", "numpy"], card())
    bandwidth = peer_bandwidth()
    lines = measured(arguments.ranks, ways, arguments.hidden, arguments.rows, arguments.launches)
    ring = 2 * (arguments.ranks - 1) / arguments.ranks
    print(f"{card()['card']}, {arguments.ranks} ranks, copy between GPUs {bandwidth * 1e3:.0f} GB/s; microseconds")
    print(f"{'rows':>6} {'KiB':>8} {'ring':>8} " + " ".join(f"{way:>9}" for way in ways))
    for line in lines:
        floor = ring * line["bytes"] / bandwidth / 1e6
        print(
            f"{line['rows']:6} {line['bytes'] / 1024:8.0f} {floor:8.2f} "
            + " ".join(f"{line[way]:9.2f}" for way in ways)
        )
    if arguments.output:
        finite = None if np.isnan(bandwidth) else bandwidth
        write_results(arguments.output, source, {"ranks": arguments.ranks, "peer_copy_tb_s": finite, "lines": lines})


if __name__ == "__main__":
    main()
