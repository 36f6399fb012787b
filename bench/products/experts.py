"""Mixtures of experts, kernel by kernel: `python -m bench.products.experts [--tune] [--output results.json]`.

For each shape, number of rows and routing (`uniform`; `zipf`, where the popularity of experts falls with their rank; or
`prompt`, where nine rows in ten are a prompt's, whose positions choose the same experts): microseconds of the router's
product, the routing, the gather, both products of the experts, the weighted sum, and of the whole MLP, ours and through
torch's grouped products. Several layers' own weights one after the other, as one CUDA graph, so that nothing is found
in L2. TB/s are those of the active experts' bytes. `--tune` times every variant of the products.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from bench.common.gpu_timing import card, copy_bandwidth, graph_microseconds
from bench.common.on_gpu import require_gpu
from bench.common.provenance import provenance, write_results
from runner_svc.cuda.experts.expert_product import ExpertProducts, product_defines
from runner_svc.cuda.experts.expert_routing import ExpertRouting
from runner_svc.cuda.experts.expert_rows import ExpertRows
from runner_svc.cuda.experts.expert_variant import TILE_JOB_ROWS, ExpertVariant, TilesVariant, Variant
from runner_svc.cuda.module import load
from runner_svc.decoder.cuda_experts import grouped_product
from runner_svc.interface.products.expert_launchers import FEW_ROWS, ExpertPlan
from runner_svc.model.families.experts_config import ClampedGate, ExpertsConfig, RouterConfig, Scoring

BF16 = torch.bfloat16
ROWS = (1, 8, 64, 256, 1024, 4096)
ROUTINGS = ("uniform", "zipf", "prompt")
VARIANTS: list[Variant] = [
    *(ExpertVariant(rows, blocks) for rows in (8, 16, 32, 64) for blocks in (1, 2)),
    ExpertVariant(128, 1),
    *(TilesVariant(rows) for rows in TILE_JOB_ROWS),
    *(TilesVariant(160, gathers, claims=True) for gathers in (False, True)),
]
_FEW_LAYERS, _MANY_LAYERS = 2, 6
_WEIGHTS_BYTES = 8_000_000_000
# Cases of this many rows or more are timed with jobs of many rows alone.
_MANY_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's hidden size and experts."""

    hidden: int
    config: ExpertsConfig


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, ExpertsConfig(128, 8, 768, RouterConfig(normalize=True), "silu")),
    "mixtral-8x7b": Shape(4096, ExpertsConfig(8, 2, 14336, RouterConfig(normalize=True), "silu")),
    "gpt-oss-20b": Shape(
        2880,
        ExpertsConfig(
            32, 4, 2880, RouterConfig(Scoring.SOFTMAX_OF_CHOSEN), "silu", bias=True, clamp=ClampedGate(1.702, 7.0)
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class ExpertTime:
    """Microseconds of a part of a layer's MLP."""

    shape: str
    rows: int
    routing: str
    active: float  # experts
    part: str
    variant: str
    microseconds: float
    tb_s: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Weights of one layer, and its own routing of the rows."""

    router: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    logits: Tensor | None = None


def make_layers(shape: Shape) -> list[Layer]:
    """Random weights, of as many layers as fit."""
    config, hidden = shape.config, shape.hidden
    size = 3 * config.num_experts * config.width * hidden * BF16.itemsize
    count = max(_FEW_LAYERS, min(_MANY_LAYERS, _WEIGHTS_BYTES // size))

    def matrix(*sizes: int) -> Tensor:
        return torch.empty(*sizes, dtype=BF16, device="cuda").normal_(0, 0.02)

    experts, inner = config.num_experts, config.width
    return [
        Layer(
            matrix(experts, hidden),
            matrix(experts, 2 * inner, hidden),
            matrix(experts, hidden, inner),
            matrix(experts, 2 * inner) if config.bias else None,
            matrix(experts, hidden) if config.bias else None,
        )
        for _ in range(count)
    ]


def make_logits(rows: int, config: ExpertsConfig, routing: str) -> Tensor:
    """float32 [rows, experts]: the largest are draws without replacement, by popularity."""
    experts = config.num_experts
    noise = -torch.empty(rows, experts, device="cuda").exponential_().log()
    if routing == "uniform":
        return noise
    if routing == "prompt":
        liked = 100.0 * (torch.randperm(experts, device="cuda") < config.top_k)
        return noise + liked * (torch.arange(rows, device="cuda") % 10 > 0).unsqueeze(1)
    ranks = torch.randperm(experts, device="cuda") + 1
    return noise - ranks.log()


class Case:
    """One shape, number of rows and routing."""

    def __init__(self, name: str, shape: Shape, layers: Sequence[Layer], rows: int, routing: str) -> None:
        self.name, self.rows, self.routing = name, rows, routing
        self._config, self._layers = shape.config, layers
        config, pairs = shape.config, rows * shape.config.top_k
        self._logits = [make_logits(rows, config, routing) for _ in layers]
        chosen = [logits.topk(config.top_k).indices for logits in self._logits]
        self.active = sum(len(each.unique()) for each in chosen) / len(chosen)
        self._matrix_bytes = config.width * shape.hidden * BF16.itemsize
        self._x = torch.randn(rows, shape.hidden, device="cuda", dtype=BF16)
        self._sorted = torch.randn(pairs, shape.hidden, device="cuda", dtype=BF16)
        self._activated = torch.randn(pairs, config.width, device="cuda", dtype=BF16)
        self._y = torch.empty(pairs, shape.hidden, device="cuda", dtype=BF16)
        self._out = torch.empty_like(self._x)
        self._scores = torch.empty(rows, config.num_experts, device="cuda")
        self._plans = [
            ExpertPlan.allocate(config.num_experts, config.top_k, rows, FEW_ROWS, self._x.device) for _ in layers
        ]
        self._routing = ExpertRouting(config, overlap=True)
        self._moving = ExpertRows(config, shape.hidden, BF16, overlap=True)
        self._products = cache(partial(ExpertProducts, config, BF16, overlap=True))
        self._is_sorted = rows > FEW_ROWS

    def time(self, part: str, variant: str, run: Callable[[int, int], None], matrices: int = 0) -> ExpertTime:
        """Of `run(stream, layer)` over all layers; it reads `matrices` of each active expert."""

        def launch() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for plan in self._plans:
                plan.jobs[1:3].zero_()  # tiles that an earlier launch of a product alone has claimed
            for layer in range(len(self._layers)):
                run(stream, layer)

        microseconds = graph_microseconds([launch], repeats=10) / len(self._layers)
        size = self.active * matrices * self._matrix_bytes
        return ExpertTime(
            self.name,
            self.rows,
            self.routing,
            self.active,
            part,
            variant,
            microseconds,
            size / microseconds / 1e6 if matrices else None,
        )

    def route(self, variant: Variant) -> Callable[[int, int], None]:
        """The routing of all layers' logits."""

        def run(stream: int, layer: int) -> None:
            logits, plan = self._logits[layer], self._plans[layer]
            self._routing(stream, logits, None, plan, variant.job_rows, alternates=variant.claims)

        return run

    def score(self, stream: int, layer: int) -> None:
        torch.mm(self._x, self._layers[layer].router.t(), out_dtype=torch.float32, out=self._scores)

    def gather(self, stream: int, layer: int) -> None:
        self._moving.gather(stream, self._x, self._plans[layer], self._sorted)

    def gate_up(self, variant: Variant) -> Callable[[int, int], None]:
        def run(stream: int, layer: int) -> None:
            own = self._layers[layer]
            is_sorted = self._is_sorted and not variant.gathers
            x = self._sorted if is_sorted else self._x
            self._products(variant).gated(
                stream,
                x,
                own.gate_up,
                own.gate_up_bias,
                self._plans[layer],
                self._activated,
                is_sorted=is_sorted,
            )

        return run

    def down(self, variant: Variant) -> Callable[[int, int], None]:
        def run(stream: int, layer: int) -> None:
            self._products(variant).store(
                stream, self._activated, self._layers[layer].down, self._plans[layer], self._y
            )

        return run

    def combine(self, stream: int, layer: int) -> None:
        self._moving.combine(stream, self._y, self._layers[layer].down_bias, self._plans[layer], self._out, adds=False)

    def own(self, variant: Variant) -> Callable[[int, int], None]:
        """The whole MLP; what the router's product gives is not what is routed."""
        parts = [self.score, self.route(variant)]
        if self._is_sorted and not variant.gathers:
            parts.append(self.gather)
        parts += [self.gate_up(variant), self.down(variant), self.combine]

        def run(stream: int, layer: int) -> None:
            for part in parts:
                part(stream, layer)

        return run

    def grouped(self, stream: int, layer: int) -> None:
        """The whole MLP through torch."""
        self.score(stream, layer)
        self._routing(stream, self._logits[layer], None, self._plans[layer], FEW_ROWS)
        self.gather(stream, layer)
        own, plan = self._layers[layer], self._plans[layer]
        gate_up = grouped_product(self._sorted, own.gate_up, plan.ends)
        self._moving.activate(stream, gate_up, own.gate_up_bias, plan, self._activated)
        y = grouped_product(self._activated, own.down, plan.ends)
        self._moving.combine(stream, y, own.down_bias, plan, self._out, adds=False)

    def grouped_products(self, stream: int, layer: int) -> None:
        """Both of torch's products alone."""
        own, plan = self._layers[layer], self._plans[layer]
        grouped_product(self._sorted, own.gate_up, plan.ends)
        grouped_product(self._activated, own.down, plan.ends)

    def check(self, variant: Variant) -> None:
        """Prints how far our MLP is from torch's."""
        stream = torch.cuda.current_stream().cuda_stream
        self.grouped(stream, 0)
        expected = self._out.float()
        self._out.fill_(torch.nan)
        self.own(variant)(stream, 0)
        error = (self._out.float() - expected).abs().max() / expected.abs().max()
        print(f"    {label(variant)}: differs from grouped products by {error:.4f} of the largest output", flush=True)


def variants(rows: int, tune: bool) -> list[Variant]:
    """Those that are timed."""
    fitting = [variant for variant in VARIANTS if rows > FEW_ROWS or variant.kernel == "expert_product"]
    if rows >= _MANY_ROWS:
        return [variant for variant in fitting if variant.job_rows >= 64]
    return fitting if tune else [ExpertVariant(8 if rows <= FEW_ROWS else 32, 2)]


def label(variant: Variant) -> str:
    """Rows of a job x blocks of a multiprocessor, or of large tiles."""
    if variant.kernel == "expert_product":
        return f"{variant.job_rows} x {variant.blocks}"
    return f"tiles {variant.job_rows}" + ", gathered" * variant.gathers + ", claimed" * variant.claims


def measure(case: Case, tune: bool) -> Iterator[ExpertTime]:
    """All parts of a case."""
    tried = variants(case.rows, tune)
    for variant in tried:
        case.check(variant)
    yield case.time("router", "cuBLAS", case.score)
    yield case.time("routing", "", case.route(tried[0]))
    yield case.time("gather", "", case.gather)
    yield case.time("combine", "", case.combine)
    for variant in tried:
        case.time("routing", "", case.route(variant))
        yield case.time("gate-up", label(variant), case.gate_up(variant), 2)
        yield case.time("down", label(variant), case.down(variant), 1)
        yield case.time("MLP", label(variant), case.own(variant), 3)
    yield case.time("products", "grouped", case.grouped_products, 3)
    yield case.time("MLP", "grouped", case.grouped, 3)


def compile_all(config: ExpertsConfig) -> None:
    """Fills the compiler's cache, as one variant after another takes a second each."""
    defines = [
        (variant.kernel, product_defines(config, variant, BF16, gated=gated, early=early))
        for variant in VARIANTS
        for gated, early in ((True, False), (True, True), (False, True))
    ]
    with ThreadPoolExecutor(14) as pool:
        list(pool.map(lambda each: load(*each), defines))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["qwen3-30b-a3b"])
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=ROUTINGS)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    require_gpu()
    source = provenance("bench.products.experts", ["torch", "cupy", "numpy"], card())
    bandwidth = copy_bandwidth()
    print(f"{card()}, copy {bandwidth:.2f} TB/s", flush=True)
    times: list[ExpertTime] = []
    for name in arguments.shapes:
        shape = SHAPES[name]
        compile_all(shape.config)
        layers = make_layers(shape)
        for rows in arguments.rows:
            for routing in arguments.routings:
                case = Case(name, shape, layers, rows, routing)
                print(f"{name}, {rows} rows, {routing}: {case.active:.1f} experts active", flush=True)
                for time in measure(case, arguments.tune):
                    rate = f"{time.tb_s:6.2f} TB/s" if time.tb_s is not None else ""
                    print(f"  {time.part:9} {time.variant:8} {time.microseconds:9.2f} us {rate}", flush=True)
                    times.append(time)
        del layers
        torch.cuda.empty_cache()
    if arguments.output:
        write_results(arguments.output, source, {"copy_tb_s": bandwidth, "times": [asdict(time) for time in times]})


if __name__ == "__main__":
    main()
