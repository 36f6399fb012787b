"""Constrained output: checks that answers are instances of their schemas, and measures the cost of the masks.

    python -m bench.answers.constrained schemas [--count 200] [--seed N] [--json FILE]
    python -m bench.answers.constrained cost --answers FILE [--json FILE]
    python -m bench.answers.constrained forced [--rows N] [--rounds N] [--threads N] [--json FILE]

`schemas` asks SmolLM2, through the real services, for an instance of each of `count` random bounded schemas,
alternating between greedy and temperature 1, and validates the answers with `jsonschema`. `cost` takes the answers of
such a run and measures
  masks  µs per row on the scheduler's side (send the tokens to its mask process, make the masks, build the message),
         for several numbers of rows per plan
  steps  ms per decode step of 8 sequences through the real services, alternately unconstrained and constrained, with
         the same lengths
`forced` measures what tokens that a grammar forces save: `rows` requests at a time, alternately without and with them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from bench.answers.forced import run_forced
from bench.common.provenance import provenance, write_results
from roster_client.client import RosterClient
from roster_client.client.events import Completion, FinishReason
from roster_client.client.requests import Message
from roster_protos import inference_pb2, plan_pb2
from runner_svc.catalog.source import model_folder
from runner_svc.model.config import ModelConfig
from runner_svc.model.description import describe_model
from runner_svc.model.folder.config_file import read_config
from runner_svc.settings.runner_settings import default_cache_folder
from scheduler_svc.constrained.mask_client import AwaitedRow, MaskClient
from tests.support.json_schemas import Schema, random_schema
from tests.support.processes import RosterProcesses

MODEL = "smollm2"
READY_S = 600.0
SLOTS = 16
MOST_TOKENS = 400
PROMPT = [Message("user", "Fill in the form with values that you make up. Answer in JSON.")]
BATCHES = (1, 8, 16)
DECODING = 8
STEPS = 48
ROUNDS = 5
"""Rounds of steps, alternately unconstrained and constrained, after one warm-up round."""
ANYTHING = "[a-zA-Z ,.]{400}"


def services(folder: Path) -> RosterProcesses:
    """Starts a scheduler and a runner with SmolLM2 on the CPU."""
    runner = {"device": "cpu", "slots": SLOTS, "threads": 2, "kv_tokens": 16384}
    return RosterProcesses(folder, runner=runner, ready_s=READY_S)


# ---------------------------------------------------------------------- answers


async def ask(client: RosterClient, index: int, schema: Schema) -> tuple[float, Completion]:
    """Returns (temperature, answer)."""
    temperature = float(index % 2)
    answer = client.generate(
        PROMPT, json_schema=schema, temperature=temperature, seed=index, max_tokens=MOST_TOKENS
    ).completion()
    return temperature, await answer


async def ask_all(address: str, schemas: list[Schema]) -> list[tuple[float, Completion]]:
    """Sends all requests at once and returns the answers."""
    async with RosterClient(address) as client:
        return await asyncio.gather(*[ask(client, index, schema) for index, schema in enumerate(schemas)])


def judged(schema: Schema, temperature: float, completion: Completion) -> dict[str, Any]:
    """Returns one row of the result; `problem` is empty for a valid answer that reached its own end."""
    (choice,) = completion.choices
    problem = ""
    if choice.finish is None or choice.finish.reason is not FinishReason.STOP:
        problem = f"it ended with {choice.finish}"
    else:
        try:
            jsonschema.Draft202012Validator(schema).validate(json.loads(choice.text))
        except (ValueError, jsonschema.ValidationError) as error:
            problem = str(error).splitlines()[0]
    return {
        "schema": schema,
        "temperature": temperature,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "problem": problem,
    }


def run_schemas(count: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(count)]
    with tempfile.TemporaryDirectory() as folder, services(Path(folder)) as running:
        began = time.perf_counter()
        answers = asyncio.run(ask_all(running.address, schemas))
        seconds = time.perf_counter() - began
    rows = [judged(schema, *answer) for schema, answer in zip(schemas, answers, strict=True)]
    valid = Counter(row["temperature"] for row in rows if not row["problem"])
    result = {
        "seed": seed,
        "schemas": count,
        "valid": valid.total(),
        "valid_greedy": valid[0.0],
        "valid_at_temperature_1": valid[1.0],
        "tokens": sum(len(row["token_ids"]) for row in rows),
        "seconds": round(seconds, 1),
        "rows": rows,
    }
    for row in rows:
        if row["problem"]:
            print("not valid:", json.dumps(row))
    print(f"{result['valid']} of {count} answers are valid; {result['tokens']} tokens in {result['seconds']} s")
    return result


# ---------------------------------------------------------------------- cost


def described_model() -> plan_pb2.Model:
    """Returns the description that a runner of SmolLM2 sends."""
    folder = model_folder(MODEL, default_cache_folder(), lambda what, share: None)
    config = ModelConfig.from_hugging_face(read_config(folder))
    return describe_model(MODEL, folder, config, "")


def mask_times(answers: list[dict[str, Any]], client: MaskClient, stops: list[int], batch: int) -> list[float]:
    """Returns µs per row of each plan; plans step through groups of `batch` answers token by token."""
    times: list[float] = []
    for first in range(0, len(answers) - batch + 1, batch):
        group = answers[first : first + batch]
        outputs = []
        for row in group:
            grammar, _ = client.check("json_schema", json.dumps(row["schema"]), [])
            outputs += client.open(grammar, 1, 0, stops)
        for step in range(min(len(row["token_ids"]) for row in group)):
            rows = [
                AwaitedRow(index, output, row["token_ids"][step - 1 : step] if step else [])
                for index, (row, output) in enumerate(zip(group, outputs, strict=True))
            ]
            began = time.perf_counter()
            made = client.make(rows)
            made.masks.SerializeToString()
            times.append((time.perf_counter() - began) / batch * 1e6)
            if made.failures:
                raise RuntimeError(f"a recorded answer does not match its schema: {made.failures}")
    return times


async def step_ms(address: str, constraint: inference_pb2.Constraint | None) -> float:
    """Returns ms per step of `DECODING` sequences that decode together, from their second token to their last."""
    async with RosterClient(address) as client:

        async def decode(seed: int) -> float:
            options: Any = {"seed": seed, "max_tokens": STEPS, "temperature": 1.0}
            options |= {"regex": constraint.regex} if constraint is not None else {"ignore_eos": True}
            times = [time.perf_counter() async for _ in client.generate(PROMPT, **options)]
            return (times[-1] - times[0]) / (STEPS - 1) * 1e3

        return float(np.mean(await asyncio.gather(*[decode(seed) for seed in range(DECODING)])))


def run_cost(answers: list[dict[str, Any]]) -> dict[str, Any]:
    model = described_model()
    result: dict[str, Any] = {"vocabulary": model.vocab_size, "mask_us_a_row": {}, "step_ms": {}}
    client = MaskClient.of(model, threads=2)
    for batch in BATCHES:
        times = mask_times(answers, client, list(model.eos_token_ids), batch)
        quantiles = dict(
            zip(("p50", "p90", "p99"), np.quantile(times, (0.5, 0.9, 0.99)).round(1).tolist(), strict=True)
        )
        result["mask_us_a_row"][batch] = {"plans": len(times), "mean": round(float(np.mean(times)), 1), **quantiles}
        print(f"masks, {batch:>2} rows a plan: {result['mask_us_a_row'][batch]}")
    client.close()
    with tempfile.TemporaryDirectory() as folder, services(Path(folder)) as running:
        kinds = {"free": None, "constrained": inference_pb2.Constraint(regex=ANYTHING)}
        rounds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(1 + ROUNDS):
            for kind, constraint in kinds.items():
                rounds[kind].append(round(asyncio.run(step_ms(running.address, constraint)), 2))
    for kind, times in rounds.items():
        result["step_ms"][kind] = {
            "median": float(np.median(times[1:])),
            "rounds": times[1:],
        }  # the first round is the warm-up
    print(f"ms per step of {DECODING} sequences: {result['step_ms']}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("schemas", "cost", "forced"))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]  # these numbers are too large on a busy machine
    if arguments.what == "schemas":
        result = run_schemas(arguments.count, arguments.seed)
    elif arguments.what == "forced":
        result = run_forced(MODEL, arguments.rows, arguments.rounds, arguments.threads)
    elif arguments.answers is None:
        parser.error("cost needs the answers of a `schemas` run: pass --answers FILE")
    else:
        result = run_cost(json.loads(arguments.answers.read_text())["rows"])
    if arguments.json is not None:
        packages = ("llguidance", "torch", "numpy", "jsonschema")
        source = provenance("bench.answers.constrained", packages)
        write_results(arguments.json, source, {"load_average_before": load, **result})


if __name__ == "__main__":
    main()
