"""Fits the H200 cost models in scheduler_svc/simulator/costs to measured steps: `python -m bench.simulator.fit_costs`.

Sources, all in bench/simulator/measured: decode steps at a mean context of 704 tokens and prefill rates of 512-token
prompts (`*-steps-fitted.json`), and, because those all have one context, the attention kernels alone
(`*-attention-d128.json`). A decode step at a long context is the measured step plus the number of layers times the
decode kernel's extra time there; a step of one 8,192-token prompt is the step of sixteen 512-token prompts plus the
prefill kernel's extra time. Steps of the service itself mix both (`sampled_steps` of `*-serving-*-fitted.json`,
bfloat16 caches); they show whether positions are charged by the tile.

By default the inputs are these files: steps and serving runs of one version of the code, which reproduce the shipped
models. Files of several versions must not be mixed, because one kind of step would be charged for another version's
time. The attention kernels' file is of an older version; only differences between its times count.

To fit to a newer version, pass all of its files, keep them under such names, and commit them with the models.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.random_model import SHAPES
from bench.gpu_serving.report import timed_step
from bench.steps.times import FIRST, LAST, MAX_STEP_TOKENS, PROMPT
from scheduler_svc.simulator.calibration.cost_fit import FitError, TimedStep, fit_cost_model
from scheduler_svc.simulator.cost_model import SHIPPED, CostModel, RunnerShape, StepWork

MEASURED = Path(__file__).parent / "measured"
DATE = "2026-11-28"
STEPS = MEASURED / f"{DATE}-h200-steps-fitted.json"
ATTENTION = MEASURED / f"{DATE}-h200-attention-d128.json"
SERVING = [MEASURED / f"{DATE}-h200-serving-{size}-fitted.json" for size in ("0.6b", "8b")]
CONTEXT = PROMPT + (FIRST + LAST) // 2
LONG_CONTEXTS = ((8, 1024, 8192), (64, 1024, 4096), (256, 1024, 2048))
"""Batch, and two contexts at which the decode kernel was timed."""
ATTENTION_HEADS = 32
"""Query heads of the attention benchmark; its prefill times scale with them."""
TILE_TOKENS = 128
"""Rows per tile of cuBLAS's products of many rows on Hopper."""
MEMORY_SHARE, WORKSPACE_GIB = 0.9, 4
"""The runner's default share of the memory, and an estimate of the activations and graphs within it."""


def timed_steps(shape: str, steps: dict[str, Any], attention: dict[str, Any]) -> list[TimedStep]:
    """Returns every step of this shape that was measured or follows from two measurements."""
    layers, heads = SHAPES[shape]["num_hidden_layers"], SHAPES[shape]["num_attention_heads"]
    kernel_s = {(m["kernel"].split(",")[0], m["case"]): m["microseconds"] * 1e-6 for m in attention["results"]}
    rows = {row["batch"]: row for row in steps["rows"] if row["shape"] == shape}
    timed = []
    for batch, row in rows.items():
        timed.append(TimedStep(decode_work(batch, CONTEXT), row["step"] * 1e-3))
        prompts = min(batch, MAX_STEP_TOKENS // PROMPT)
        timed.append(TimedStep(prefill_work(prompts, PROMPT), prompts * PROMPT / row["prefill_tokens_per_s"]))
    for batch, short, long in LONG_CONTEXTS:
        longer_s = kernel_s["decode", f"{batch} x {long}"] - kernel_s["decode", f"{batch} x {short}"]
        step_s = rows[batch]["step"] * 1e-3 + layers * longer_s
        timed.append(TimedStep(decode_work(batch, CONTEXT + long - short), step_s))
    longer_s = (kernel_s["prefill", "1 x 8192"] - kernel_s["prefill", "16 x 512"]) * heads / ATTENTION_HEADS
    many_s = MAX_STEP_TOKENS / rows[max(rows)]["prefill_tokens_per_s"]
    timed.append(TimedStep(prefill_work(1, MAX_STEP_TOKENS), many_s + layers * longer_s))
    return timed


def served_steps(shape: str, files: Iterable[Path]) -> list[TimedStep]:
    """Returns the sampled steps in serving runs of this shape."""
    runs = [json.loads(file.read_text()) for file in files]
    runs = [run for run in runs if run["shape"] == shape and "kv_cache_dtype" not in run["command"]]
    loads = [load for run in runs for load in run["loads"]]
    return [timed_step(line) for load in loads for line in load.get("sampled_steps", ())]


def decode_work(batch: int, context: int) -> StepWork:
    """Returns the work of a step of `batch` decoding rows."""
    return StepWork(batch, batch, batch * context, 0.0)


def prefill_work(prompts: int, length: int) -> StepWork:
    """Returns the work of a step of whole prompts."""
    return StepWork(prompts * length, prompts, prompts * length, prompts * length * (length + 1) / 2)


def runner_shape(shape: str, gib: int) -> RunnerShape:
    """Returns a runner with default slots and step size. Its KV cache is estimated for bfloat16 weights."""
    config = SHAPES[shape]
    width, layers, kv = config["hidden_size"], config["num_hidden_layers"], config["num_key_value_heads"]
    attention = width * config["head_dim"] * (2 * config["num_attention_heads"] + 2 * kv)
    weights = layers * (attention + 3 * width * config["intermediate_size"])
    weights += config["vocab_size"] * width * (1 if config["tie_word_embeddings"] else 2)
    free = (gib * MEMORY_SHARE - WORKSPACE_GIB) * 2**30 - 2 * weights
    tokens = int(free / (layers * kv * config["head_dim"] * 2 * 2))
    return RunnerShape(
        slots=256, kv_tokens=tokens // 16 * 16, step_tokens=MAX_STEP_TOKENS, vocab_size=config["vocab_size"]
    )


def fit(shape: str, steps_file: Path, attention_file: Path, served: Sequence[TimedStep]) -> tuple[CostModel, FitError]:
    """Fits the cost model of one shape."""
    steps, attention = json.loads(steps_file.read_text()), json.loads(attention_file.read_text())
    source = (
        f"python -m bench.simulator.fit_costs: {steps_file.name} and {attention_file.name} ({steps['card']['card']}), "
        f"{len(served)} steps of the service; KV cache estimated from the memory, link times not measured"
    )
    timed = [*timed_steps(shape, steps, attention), *served]
    runner = runner_shape(shape, steps["card"]["gib"])
    return fit_cost_model(f"h200-{shape}", source, timed, runner, tile_tokens=TILE_TOKENS)


def served_ratios(model: CostModel, served: Sequence[TimedStep]) -> dict[str, list[float]]:
    """Returns predicted / measured times by kind of step."""
    ratios: dict[str, list[float]] = {}
    for step in served:
        kind = "decode" if step.work.tokens == step.work.sequences else "mixed"
        ratios.setdefault(kind, []).append(model.step_seconds(step.work) / step.seconds)
    return ratios


def _shown(ratios: list[float]) -> str:
    return ", ".join(f"{ratio:.3f}" for ratio in np.percentile(ratios, (10, 50, 90)))


def code_versions(files: Iterable[Path]) -> set[str]:
    """Returns the commits that produced these results."""
    return {json.loads(file.read_text())["commit"] for file in files}


def main(arguments: Sequence[str] | None = None) -> None:
    """Fits each shape, prints the errors and writes the models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=Path, default=STEPS)
    parser.add_argument("--attention", type=Path, default=ATTENTION)
    parser.add_argument("--serving", type=Path, nargs="*", default=SERVING)
    parser.add_argument(
        "--output", type=Path, default=SHIPPED, help="output folder; by default the shipped models are replaced"
    )
    options = parser.parse_args(arguments)
    versions = code_versions([options.steps, *options.serving])
    if len(versions) > 1:
        parser.error(f"steps and serving runs are from several versions of the code: {', '.join(sorted(versions))}")
    steps, attention = json.loads(options.steps.read_text()), json.loads(options.attention.read_text())
    for shape in SHAPES:
        served = served_steps(shape, options.serving)
        model, error = fit(shape, options.steps, options.attention, served)
        print(
            f"{model.name}: error p50 {error.median:.1%}, p90 {error.p90:.1%}, {error.left_out} of the steps left out"
        )
        for step in timed_steps(shape, steps, attention):
            predicted = model.step_seconds(step.work)
            print(f"  {step.work} measured {step.seconds * 1e3:.3f} ms, model {predicted * 1e3:.3f} ms")
        for name, ratios in served_ratios(model, served).items():
            print(f"  {len(ratios)} {name} steps of the service: model / measured at p10, p50, p90 {_shown(ratios)}")
        (options.output / f"{model.name}.json").write_text(model.model_dump_json(indent=2) + "\n")


if __name__ == "__main__":
    main()
