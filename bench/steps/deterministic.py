"""Times whole passes of the deterministic mode beside the fastest plain ones: `python -m bench.steps.deterministic`.

Each case is a CUDA graph of a decoder's pass with its logits, without sampling: decode steps by rows and context,
prefill of a prompt, and mixed steps of decoding rows and a chunk. Of the plain ways to launch a case the fastest
counts; then both are replayed in turns. Weights, cache and slots are the same for both. `--profile` prints both by
kernel, too: a kernel's time includes its wait for the one before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from bench.common.gpu_timing import card, copy_bandwidth
from bench.common.on_gpu import require_gpu
from bench.common.random_model import ALL_SHAPES
from bench.steps.backend import BLOCK_SIZE, DTYPE, no_progress
from bench.steps.profile import print_profile, profiled
from runner_svc.cuda.canonical.products import CanonicalProducts
from runner_svc.cuda.device import GpuDevice
from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.gpu.canonical.decoder import CanonicalDecoder
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.gpu.launchers import CudaLaunchers
from runner_svc.gpu.profiling_batch import batch_of
from runner_svc.gpu.step_buffers import PackedStep
from runner_svc.gpu.steps import CudaSteps
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.products.canonical_launchers import Planned
from runner_svc.interface.step import StepBatch
from runner_svc.model.checkpoint.random_weights import random_weights
from runner_svc.model.config import ModelConfig
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.model_weights import LayerWeights, MlpWeights, ModelWeights

KINDS = ("decode", "prefill", "mixed", "long")
DECODE = ((256, 512), (64, 512), (8, 512), (1, 512))
LONG = ((1, 131_072), (8, 8192), (1, 8192))
PREFILL = (2048, 8192)
MIXED = ((32, 480), (32, 2016))
"""Decoding rows at 512 tokens of context, and a chunk's positions."""
_SLOTS, _MOST_TOKENS, _MOST_CONTEXT = 256, 8192, 131_200
_BLOCKS = 256 * 640 // BLOCK_SIZE
_ROUNDS, _PROFILED = 5, 5

Launch = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Case:
    """A step: its rows' first positions and numbers of positions."""

    name: str
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def batch(self) -> StepBatch:
        """As a backend gets it."""
        return batch_of(np.array(self.starts, np.int32), np.array(self.counts, np.int32))

    @property
    def decodes(self) -> bool:
        """Whether all rows decode."""
        return all(count == 1 for count in self.counts)


def cases(kinds: list[str]) -> Iterator[Case]:
    """Yields the cases of some of KINDS."""
    for kind in kinds:
        for batch, context in {"decode": DECODE, "long": LONG}.get(kind, ()):
            yield Case(f"decode {batch} x {context}", (context - 1,) * batch, (1,) * batch)
        for count in PREFILL if kind == "prefill" else ():
            yield Case(f"prefill {count}", (0,), (count,))
        for rows, chunk in MIXED if kind == "mixed" else ():
            yield Case(f"mixed {rows} + {chunk}", (*((511,) * rows), 0), (*((1,) * rows), chunk))


class Ways:
    """The ways of a decoder to compute a case."""

    def __init__(self, steps: CudaSteps, device: GpuDevice) -> None:
        self._steps, self._device = steps, device

    def of(self, case: Case, names: list[str] | None = None) -> dict[str, Launch]:
        """Packs the case; returns replays by name, of `names` alone if there are any of them, until the next call."""
        steps, device = self._steps, self._device
        packed = PackedStep(steps.layout, np.zeros(steps.layout.words, np.int32))
        launches: dict[str, Launch] = {}
        if case.decodes:
            rows = len(case.counts)
            steps.pack_decode(packed, case.batch, rows)
            launches = {way.name: way.launch for way in steps.decode_variants(device.current_stream, rows)}
        else:
            step = steps.pack_mixed(packed, case.batch)
            for fusions in steps.mixed_fusions(sum(case.counts)):
                chosen = replace(step, shape=replace(step.shape, fusions=fusions))
                launches[fusions.name] = partial(self._mixed, chosen)
        steps.packed.copy_(torch.from_numpy(packed.words))
        wanted = {name: launch for name, launch in launches.items() if names is None or name in names}
        return {name: device.capture(launch) for name, launch in (wanted or launches).items()}

    def _mixed(self, step: object) -> None:
        self._steps.run_mixed(self._device.current_stream(), step)  # type: ignore[arg-type]


def compile_products(products: CanonicalProducts, layer: LayerWeights, head: LinearWeights) -> None:
    """Compiles what the cases need in parallel; the disk cache keeps it for the decoder."""
    planned = [Planned("store", layer.qkv.matrix, DTYPE), Planned("add", layer.output.matrix, DTYPE)]
    if isinstance(layer.mlp, MlpWeights):
        planned += [Planned("gated", layer.mlp.gate_up.matrix, DTYPE), Planned("add", layer.mlp.down.matrix, DTYPE)]
    products.compile(planned, (1, 8, 32, 64, 256, 512, 2048, _MOST_TOKENS))
    products.compile([Planned("store", head.matrix, torch.float32)], (1, 8, 64, 256))


def steps_of(
    config: ModelConfig,
    weights: ModelWeights,
    layers: list[LayerWeights],
    cache: KVCache,
    slots: DeviceSlots,
    *,
    canonical: bool,
) -> CudaSteps:
    """Returns the steps of a decoder of its own over shared weights, cache and slots."""
    launchers = CudaLaunchers(config, DTYPE, canonical=canonical)
    if canonical:
        compile_products(launchers.canonical(_MOST_TOKENS), layers[0], weights.head)
    own = ModelWeights(weights.embeddings, weights.head, weights.norm, iter(layers))
    of_layers = launchers.decoder(False)
    if canonical:
        decoder: CudaDecoder = CanonicalDecoder(config, own, of_layers, launchers.canonical(_MOST_TOKENS), _MOST_TOKENS)
    else:
        decoder = CudaDecoder(config, own, of_layers, _MOST_TOKENS)
    return CudaSteps(
        decoder, cache, slots, launchers, num_slots=_SLOTS, max_step_tokens=_MOST_TOKENS, tail_words=8
    )  # fmt: skip


def compare(
    case: Case,
    plain: Ways,
    canonical: Ways,
    slots: DeviceSlots,
    cache: KVCache,
    device: GpuDevice,
    names: list[str] | None,
    profiles: bool,
) -> list[Launch]:
    """Prints a case's milliseconds by both. Returns the graphs: the device's pool ends with the last that is kept."""
    slots.spread(max(start + count for start, count in zip(case.starts, case.counts, strict=True)), cache)
    begin = time.perf_counter()
    (mode,) = canonical.of(case).values()
    ways = plain.of(case, names)
    timed = {name: device.seconds(replay, 3) for name, replay in ways.items()}
    best = min(timed, key=lambda name: timed[name])
    rounds = [[device.seconds(replay, 3) for replay in (ways[best], mode)] for _ in range(_ROUNDS)]
    usual, ours = (float(np.median(times)) * 1e3 for times in zip(*rounds, strict=True))
    print(
        f"{case.name:20} {usual:9.3f} {ours:9.3f} ms  {ours / usual:.3f} ({usual / ours:.3f})  {best}"
        f"  [{time.perf_counter() - begin:.1f} s]",
        flush=True,
    )
    for replay in (ways[best], mode) if profiles else ():
        print_profile(profiled(repeated(replay, device, _PROFILED), 0), _PROFILED, in_order=16)
    return [ways[best], mode]


def repeated(replay: Launch, device: GpuDevice, count: int) -> Iterator[None]:
    """Yields after each of some replays, and waits for the last."""
    for _ in range(count):
        replay()
        yield
    device.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--ways", nargs="+", help="plain ways to try where there are any of them, to save time")
    parser.add_argument("--layers", type=int, help="fewer than the model's, to save time")
    parser.add_argument("--profile", action="store_true", help="print each case by kernel")
    arguments = parser.parse_args()
    require_gpu()
    raw = ALL_SHAPES[arguments.shape]
    config = ModelConfig.from_hugging_face(raw | ({"num_hidden_layers": arguments.layers} if arguments.layers else {}))
    device = GpuDevice()
    with device.stream(), torch.inference_mode():
        weights = random_weights(config, DTYPE, torch.device("cuda"), no_progress)
        layers = list(weights.layers)
        cache = KVCache(config, _BLOCKS, BLOCK_SIZE, DTYPE, torch.device("cuda"))
        cache.data.normal_()
        slots = DeviceSlots(_SLOTS, _MOST_CONTEXT, -(-_MOST_CONTEXT // BLOCK_SIZE), torch.device("cuda"))
        slots.tokens.random_(config.vocab_size)
        plain, canonical = (
            Ways(steps_of(config, weights, layers, cache, slots, canonical=each), device) for each in (False, True)
        )
        print(f"{card()['card']}, copy {copy_bandwidth():.2f} TB/s: plain, deterministic")
        kept: list[Launch] = []
        for case in cases(list(arguments.kinds)):
            kept[:] = compare(case, plain, canonical, slots, cache, device, arguments.ways, arguments.profile)


if __name__ == "__main__":
    main()
