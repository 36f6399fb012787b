"""Times decode and prefill attention of one step, one after the other and side by side.

`python -m bench.kernels.mixed_attention` prints microseconds per layer on the local GPU, from CUDA graphs over several
copies of the cache, so that L2 holds none of it. `--tune` sweeps the number of multiprocessors for decode; the costs in
`attention.mixed_plan` come from such a sweep.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from bench.common.gpu_timing import card, graph_microseconds
from bench.common.on_gpu import require_gpu
from bench.common.provenance import provenance, write_results
from bench.kernels.attention import Bench
from bench.kernels.attention_cases import Shape
from runner_svc.attention.mixed_plan import MixedPlanner
from runner_svc.cuda.module import num_multiprocessors
from runner_svc.interface.attention_launcher import DecodeRows, PrefillRows

SHAPES = {
    "llama-3.1-8b": Shape(32, 8, 128),
    "qwen3-0.6b": Shape(16, 8, 128),
    "8B, FP8 cache": Shape(32, 8, 128, fp8_cache=True),
    "0.6B, FP8 cache": Shape(16, 8, 128, fp8_cache=True),
    "heads of 64": Shape(32, 8, 64),
}
# Decoding rows and their lengths; positions of a chunk and its start.
CASES = (
    (8, 1000, 1016, 0),
    (32, 530, 992, 992),
    (32, 1500, 992, 1000),
    (32, 530, 2016, 0),
    (32, 530, 4064, 0),
    (24, 1300, 1000, 3000),
    (128, 1000, 896, 1000),
)
SWEPT = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 132)
_COPIES = 4


@dataclass(frozen=True, slots=True)
class MixedAttentionTime:
    """Microseconds per layer, and the number of blocks for decode."""

    shape: str
    rows: int
    context: int
    chunk: int
    start: int
    decode: float
    prefill: float
    one_by_one: float
    side_by_side: float
    blocks: int
    swept: dict[int, float]


class Case:
    """Decoding rows after a row with a chunk, over a cache of several layers."""

    def __init__(self, shape: Shape, rows: int, context: int, chunk: int, start: int) -> None:
        self._bench = Bench(shape, [context] * rows + [start + chunk], _COPIES)
        self._queries, self._output = self._bench.tensors(rows + chunk)
        indexes = np.arange(rows, dtype=np.int32)
        self.decode = DecodeRows(np.full(rows, context, np.int32), indexes, indexes)
        self.prefill = PrefillRows(*(np.array([value], np.int32) for value in (start, chunk, rows, rows)))
        self._rows = rows
        self._words = self._bench.attention.prefill_plan_words(chunk, 1)

    def side_by_side(self) -> tuple[float, int]:
        """Returns the time side by side and the number of blocks for decode."""
        attention, rows, words = self._bench.attention, self._rows, self._words
        plan = np.zeros(attention.mixed_plan_words(rows, words), np.int32)
        attention.plan_mixed(self.decode, self.prefill, plan, rows, words)
        address, keep = _on_device(plan)

        def launch(stream: int, layer: int) -> None:
            attention.run_mixed(stream, layer, self._queries, self._output, address, rows, words)

        dealt = int(plan[len(plan) - words + 1])  # number of blocks among which prefill is divided
        return self._time(launch, keep), num_multiprocessors() - dealt

    def one_by_one(self, decode: bool = True, prefill: bool = True) -> float:
        """Returns the time one after the other, or of one of them alone."""
        attention, rows, words = self._bench.attention, self._rows, self._words
        decode_plan = np.zeros(attention.decode_plan_words(rows), np.int32)
        prefill_plan = np.zeros(words, np.int32)
        attention.plan_decode(self.decode.lengths, self.decode.table_rows, decode_plan)
        chunk = self.prefill
        attention.plan_prefill(chunk.starts, chunk.counts, chunk.table_rows, chunk.query_rows, prefill_plan)
        (first, _), (second, _) = keep = _on_device(decode_plan), _on_device(prefill_plan)

        def launch(stream: int, layer: int) -> None:
            if decode:
                attention.run_decode(stream, layer, self._queries, self._output, first, rows)
            if prefill:
                attention.run_prefill(stream, layer, self._queries, self._output, second, words)

        return self._time(launch, keep)

    def _time(self, launch: Callable[[int, int], None], keep: object) -> float:
        """Returns the time of one layer; `keep` stays alive until then."""

        def all_layers() -> None:
            for layer in range(_COPIES):
                launch(torch.cuda.current_stream().cuda_stream, layer)

        return graph_microseconds([all_layers] * 2, repeats=15) / _COPIES


def _on_device(plan: np.ndarray) -> tuple[int, torch.Tensor]:
    """Returns the plan's device address and the tensor that must stay alive meanwhile."""
    tensor = torch.from_numpy(plan).cuda()
    return tensor.data_ptr(), tensor


def measure(shapes: Sequence[str], tune: bool) -> Iterator[MixedAttentionTime]:
    for name in shapes:
        for numbers in CASES:
            case = Case(SHAPES[name], *numbers)
            swept = {}
            for blocks in SWEPT if tune else ():
                with patch.object(MixedPlanner, "decode_blocks", lambda *_, blocks=blocks: blocks):
                    swept[blocks] = case.side_by_side()[0]
            yield MixedAttentionTime(
                name,
                *numbers,
                case.one_by_one(prefill=False),
                case.one_by_one(decode=False),
                case.one_by_one(),
                *case.side_by_side(),
                swept,
            )


def print_line(time: MixedAttentionTime) -> None:
    swept = " ".join(f"{blocks}: {taken:.1f}" for blocks, taken in time.swept.items())
    print(
        f"{time.shape:15} {time.rows:3} x {time.context:4} and {time.chunk:4} from {time.start:4}: decode "
        f"{time.decode:5.1f}, prefill {time.prefill:5.1f}, one by one {time.one_by_one:6.1f}, side by side "
        f"{time.side_by_side:6.1f} with {time.blocks:2}  {swept}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    require_gpu()
    source = provenance("bench.kernels.mixed_attention", ["torch", "cupy", "numpy"], card())
    print(card())
    times = []
    for time in measure(arguments.shapes, arguments.tune):
        times.append(time)
        print_line(time)
    if arguments.output:
        write_results(arguments.output, source, {"times": [asdict(time) for time in times]})


if __name__ == "__main__":
    main()
