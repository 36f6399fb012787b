"""Times a swap of sequences to the host pool and back, and computing them again: `python -m bench.steps.swapping`.

Weights are random. The prompts are computed, two to a step of 8,192 positions, as after a preemption without a host
pool. Then each sequence's blocks go out as one ticket, all tickets in one plan, the cache is overwritten, and all come
back as they were. Sequences lie apart in the cache, as in a pool that has been in use. Nothing else runs meanwhile.
"""

from __future__ import annotations

import argparse
import time
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from bench.common.gpu_timing import card
from bench.common.on_gpu import require_gpu
from bench.common.random_model import ALL_SHAPES
from bench.steps.backend import BLOCK_SIZE, backend_of, no_progress
from bench.steps.times import MAX_STEP_TOKENS
from roster_common.link_protocol import TAG_BYTES
from roster_protos import plan_pb2
from runner_svc.execution.plans_in_flight import LaunchedPlan
from runner_svc.execution.runner import Runner

_DEPTH = 2
_POISON = 0xA5


class Swapping:
    """A runner, and the blocks of sequences that it computes, offloads and loads."""

    def __init__(self, runner: Runner, sequences: int, prompt: int, vocab_size: int) -> None:
        self._runner = runner
        self._prompt, self._vocab_size = prompt, vocab_size
        self._number = 0
        self._seated = 0  # slots that have a sequence, the first ones
        blocks = 1 + np.arange(sequences * (prompt // BLOCK_SIZE), dtype=np.int32)
        self.blocks = np.ascontiguousarray(blocks.reshape(-1, sequences).T)
        """Blocks of each sequence, int32 [sequences, blocks]."""
        runner.reset(b"secret")

    def compute(self) -> float:
        """Computes all prompts; returns the seconds."""
        per_step = MAX_STEP_TOKENS // self._prompt
        slots = np.arange(per_step, dtype=np.int32)
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, self._vocab_size, (len(self.blocks), self._prompt), dtype=np.int32)
        begin_s = time.perf_counter()
        pending: deque[LaunchedPlan] = deque()
        for first in range(0, len(self.blocks), per_step):
            rows = slots[: len(self.blocks) - first]
            plan = plan_pb2.Plan(
                releases=slots[: self._seated].tobytes(),
                admissions=[self._admission(slot, tokens, first + slot) for slot in rows.tolist()],
                extent_slots=rows.tobytes(),
                extent_starts=np.zeros_like(rows).tobytes(),
                extent_counts=np.full_like(rows, self._prompt).tobytes(),
                extent_flags=np.zeros(len(rows), np.uint8).tobytes(),
            )
            self._seated = len(rows)
            pending.append(self._launch(plan))
            if len(pending) == _DEPTH:
                pending.popleft().wait()
        for launched in pending:
            launched.wait()
        return time.perf_counter() - begin_s

    def _admission(self, slot: int, tokens: NDArray[np.int32], sequence: int) -> plan_pb2.Admission:
        return plan_pb2.Admission(
            slot=slot,
            sequence_id=sequence + 1,
            tokens=tokens[sequence].tobytes(),
            prompt_len=self._prompt,
            sampling=plan_pb2.Sampling(temperature=0.0, top_p=1.0, repetition_penalty=1.0),
            blocks=self.blocks[sequence].tobytes(),
        )

    def move_out(self) -> float:
        """Copies all sequences to the host pool, which holds them in the order of sequences; returns the seconds."""
        sources, targets, counts = self._columns()
        tags = bytes(TAG_BYTES * self.blocks.size)
        return self._copied(
            plan_pb2.Plan(offload_sources=sources, offload_targets=targets, offload_counts=counts, offload_tags=tags)
        )

    def move_in(self) -> float:
        """Copies them back; returns the seconds."""
        targets, sources, counts = self._columns()
        return self._copied(plan_pb2.Plan(load_sources=sources, load_targets=targets, load_counts=counts))

    def _columns(self) -> tuple[bytes, bytes, bytes]:
        """Returns blocks of the cache, of the host pool, and the tickets' sizes."""
        hosted = 1 + np.arange(self.blocks.size, dtype=np.int32)
        counts = np.full(len(self.blocks), self.blocks.shape[1], np.int32)
        return self.blocks.tobytes(), hosted.tobytes(), counts.tobytes()

    def _copied(self, plan: plan_pb2.Plan) -> float:
        """Launches the plan and looks, as a runner does, until all its copies are done."""
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        launched = self._launch(plan)
        while self._runner.look_at_copies():
            pass
        seconds = time.perf_counter() - begin_s
        launched.wait()
        return seconds

    def _launch(self, plan: plan_pb2.Plan) -> LaunchedPlan:
        self._number += 1
        return self._runner.launch(self._number, plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(ALL_SHAPES), help="of the model")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=2, help="times that all is measured")
    options = parser.parse_args()
    require_gpu()
    num_blocks = options.sequences * (options.prompt // BLOCK_SIZE)
    backend = backend_of(options.shape, largest=8, context_length=options.prompt + 1, num_blocks=num_blocks)
    begin_s = time.perf_counter()
    copier = backend.host_copier(num_blocks, no_progress)
    gigabytes = num_blocks * copier.block_bytes / 1e9
    print(f"{card()}; {gigabytes:.1f} GB of KV, page-locked in {time.perf_counter() - begin_s:.1f} s", flush=True)
    runner = Runner(backend, copier=copier)
    swapping = Swapping(runner, options.sequences, options.prompt, runner.hello().model.vocab_size)
    data = backend.cache.data.view(torch.uint8)
    for _ in range(options.rounds):
        computed_s = swapping.compute()
        kept = data.clone()
        out_s = swapping.move_out()
        data.fill_(_POISON)
        in_s = swapping.move_in()
        same = all(torch.equal(*pair) for pair in zip(data[:, :, 1:], kept[:, :, 1:], strict=True))
        share = (out_s + in_s) / computed_s
        rates = f"out {out_s:.3f} s = {gigabytes / out_s:.1f} GB/s, in {in_s:.3f} s = {gigabytes / in_s:.1f} GB/s"
        print(f"computed {computed_s:.3f} s; {rates}; {share:.3f} of computing; same: {same}", flush=True)


if __name__ == "__main__":
    main()
