"""What the ranks of a group do alike because rank 0 says so: the sizes and variants of captured steps.

A captured step exchanges rows padded to its size, so ranks must have graphs of the same sizes. Rank 0 measures, alone
and without exchanges, and the others take its times in place of their own.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from runner_svc.interface.ranks import Communicator
from runner_svc.timings.start_timings import StartTimings


def agreed_timings(ranks: Communicator, own: StartTimings, device: torch.device) -> StartTimings:
    """Returns rank 0's timings of steps on every rank; `own` are used on rank 0 alone."""
    steps = StartTimings(own.decode, own.mixed)
    data = json.dumps(steps.to_json()).encode() if ranks.shard.rank == 0 else b""
    size = ranks.broadcast(torch.tensor([len(data)], dtype=torch.int64, device=device))
    sent = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if data:
        sent.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return StartTimings.from_json(json.loads(_bytes(ranks.broadcast(sent))))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
