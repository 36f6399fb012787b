"""Measures one part: on a server that is ready, or by a process of its own."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.baselines.workload_file import write_workload
from bench.common.quantization import command_flags
from bench.common.random_model import ALL_SHAPES
from bench.gpu_comparison.peers.load import LoadFailed, run_load
from bench.gpu_comparison.peers.log import Log
from bench.gpu_comparison.peers.numbers import bench_steps_numbers, decode_numbers, load_numbers, padded_numbers
from bench.gpu_comparison.peers.parts import AT_ONCE, DECODE_ROWS, ROSTER, TRANSFORMERS, Part
from bench.gpu_comparison.peers.servers import Serving, model_folder, tail
from bench.gpu_comparison.peers.workloads import WARM_UP, Recipe, workload
from roster_client.bench.records.record_file import read_run
from roster_client.serve.child_process import ChildProcess

STEPS = "bench.steps"
BASELINES = "bench.baselines"
STOP_S = 5.0


async def warm_up(options: argparse.Namespace, serving: Serving, system: str, log: Log) -> None:
    """Sends requests that do not count. Raises LoadFailed."""
    recipe = Recipe.of(options, Part(system, WARM_UP), serving.server.vocab_size)
    await run_load(serving.server, replace(recipe, seed=recipe.seed + 1), options.client_processes, log.line)


async def served_part(options: argparse.Namespace, serving: Serving, part: Part, log: Log) -> dict[str, Any]:
    """Returns the numbers of a part on a server. Raises LoadFailed."""
    recipe = Recipe.of(options, part, serving.server.vocab_size)
    processes = options.client_processes
    if part.kind not in DECODE_ROWS:
        whole = part.kind == AT_ONCE
        return load_numbers(await run_load(serving.server, recipe, processes, log.line, whole=whole))
    found = {}
    for rows in DECODE_ROWS[part.kind]:
        seen = await run_load(serving.server, recipe, processes, log.line, decode_rows=rows)
        try:
            found[str(rows)] = decode_numbers(seen.requests, *recipe.timed_tokens())
        except ValueError as error:
            raise LoadFailed(f"{rows} rows: {error}") from None
    return {name: {rows: values[name] for rows, values in found.items()} for name in next(iter(found.values()))}


async def own_process_part(options: argparse.Namespace, part: Part, log: Log) -> dict[str, Any]:
    """Returns the numbers of a part that a process of its own measures. Raises LoadFailed."""
    with tempfile.TemporaryDirectory(prefix="roster-part-") as name:
        folder = Path(name)
        if part.system == ROSTER:
            return await _steps(options, part, folder, log)
        return await _padded(options, part, folder, log)


async def _steps(options: argparse.Namespace, part: Part, folder: Path, log: Log) -> dict[str, Any]:
    output = folder / "steps.json"
    batches = map(str, DECODE_ROWS[part.kind])
    command = [STEPS, "--shapes", options.shape, "--batches", *batches, f"--output={output}"]
    command += command_flags(options)
    await _run(command, log)
    return bench_steps_numbers(json.loads(output.read_text()))


async def _padded(options: argparse.Namespace, part: Part, folder: Path, log: Log) -> dict[str, Any]:
    recipe = Recipe.of(options, part, ALL_SHAPES[options.shape]["vocab_size"])
    write_workload(folder / "requests.jsonl", workload(recipe))
    command = [BASELINES, "padded", f"--workload={folder / 'requests.jsonl'}", f"--out={folder / 'run.jsonl'}"]
    command += [f"--model={model_folder(options.shape)}", f"--device={options.device}", f"--slots={part.rows}"]
    await _run(command, log)
    try:
        return padded_numbers(read_run(folder / "run.jsonl").requests)
    except ValueError as error:
        raise LoadFailed(str(error)) from None


async def _run(command: list[str], log: Log) -> None:
    """Runs a module of bench to its end. Raises LoadFailed."""
    name = TRANSFORMERS if command[0] == BASELINES else ROSTER
    child = await ChildProcess.start(name, [sys.executable, "-m", *command], log.line)
    try:
        status = await child.wait()
    finally:
        await child.stop(STOP_S)
    if status:
        raise LoadFailed(f"python -m {command[0]} ended with status {status}: {tail(child)}")
