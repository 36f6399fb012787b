"""Measures drafts: `python -m bench.speculation [--draft SETTING] [--model NAME] [--rows 1 4] [--drafts 3 7]`.

The backend alone answers the prompts of `bench.speculation.prompts`, task by task and `--rows` at a time, without
drafts and with each number of `--drafts` in every row and step. The runs alternate, `--rounds` times; the gain is the
median of the rounds' ratios. A scheduler would choose fewer drafts where they do not pay.

With `--service`, both services answer them instead, once without and once with the drafter, and the scheduler decides
what is drafted. The prompts are cached before. With `--device cuda` there is one service, whose requests forbid
drafts or let it draft. The backend alone is that of a CPU.

With `--threads 1` the clock is the CPU time of the thread or the runner, so that other programs disturb less;
otherwise it is the wall's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.common.provenance import provenance, write_results
from bench.speculation.backend_runs import Answers, Clock, answer
from bench.speculation.prompts import PROMPTS
from bench.speculation.service_runs import Served
from roster_common.logs import configure_logs
from roster_protos import inference_pb2
from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.settings.runner_settings import RunnerSettings, default_cache_folder
from runner_svc.startup.drafters import cpu_drafter
from scheduler_svc.front.text.tokenizer import ModelText

COLUMNS = (
    "task", "rows", "drafts", "accepted by position", "verified a row", "tokens a row", "tokens/s without", "with",
    "gain", "answers that part",
)  # fmt: skip
SERVICE_COLUMNS = (
    "task", "rows", "drafted a token", "accepted a token", "tokens/s without", "with", "gain", "answers that part",
)  # fmt: skip


@dataclass
class Case:
    """One task with a number of rows and of drafts: its rounds, beside those without drafts."""

    task: str
    rows: int
    drafts: int
    plain: list[list[Answers]] = field(default_factory=list)
    drafted: list[list[Answers]] = field(default_factory=list)

    @property
    def gain(self) -> float:
        """Tokens a second relative to the run without drafts: the median of the rounds."""
        pairs = zip(self.plain, self.drafted, strict=True)
        return statistics.median(_rate(drafted) / _rate(plain) for plain, drafted in pairs)

    @property
    def acceptance(self) -> list[float]:
        """Of the drafts that were verified at each position, the share that was accepted with all before it."""
        offered, accepted = ([sum(column) for column in zip(*part, strict=True)] for part in self._by_position())
        return [a / o if o else 0.0 for a, o in zip(accepted, offered, strict=True)]

    @property
    def tokens_per_row(self) -> float:
        """Tokens of a row and step."""
        last = self.drafted[-1]
        return sum(run.decoded for run in last) / sum(run.rows for run in last)

    @property
    def verified_per_row(self) -> float:
        last = self.drafted[-1]
        return sum(run.verified for run in last) / sum(run.rows for run in last)

    @property
    def parted(self) -> int:
        """Answers that differ from those without drafts."""
        pairs = zip(self.plain[-1], self.drafted[-1], strict=True)
        return sum(a != b for one, other in pairs for a, b in zip(one.tokens, other.tokens, strict=True))

    def _by_position(self) -> tuple[list[list[int]], list[list[int]]]:
        last = self.drafted[-1]
        return [run.offered for run in last], [run.accepted for run in last]

    def numbers(self) -> dict[str, Any]:
        """Returns what the JSON has of the case."""
        return {
            "task": self.task,
            "rows": self.rows,
            "drafts": self.drafts,
            "gain": round(self.gain, 3),
            "tokens_per_s": round(statistics.median(map(_rate, self.drafted)), 2),
            "plain_tokens_per_s": round(statistics.median(map(_rate, self.plain)), 2),
            "tokens_per_row": round(self.tokens_per_row, 3),
            "verified_per_row": round(self.verified_per_row, 3),
            "acceptance": [round(share, 3) for share in self.acceptance],
            "parted": self.parted,
        }


def _rate(runs: Sequence[Answers]) -> float:
    return sum(run.decoded for run in runs) / sum(run.seconds for run in runs)


def measure(
    backend: TorchBackend, prompts: dict[str, list[list[int]]], options: argparse.Namespace, clock: Clock
) -> list[Case]:
    """Returns all cases, measured; prints each."""
    cases = []
    for rows in options.rows:
        for task in options.tasks:
            groups = [prompts[task][at : at + rows] for at in range(0, len(prompts[task]), rows)]
            own = [Case(task, rows, drafts) for drafts in options.drafts]

            def run(drafts: int, groups: list[list[list[int]]] = groups) -> list[Answers]:
                fixed = {"max_tokens": options.max_tokens, "temperature": options.temperature, "clock": clock}
                return [answer(backend, group, drafts=drafts, **fixed) for group in groups]

            for _ in range(options.rounds):
                plain = run(0)
                for case in own:
                    case.plain.append(plain)
                    case.drafted.append(run(case.drafts))
            for case in own:
                print(row_of(case), flush=True)
            cases += own
    return cases


def measure_service(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a record of each task and number of rows, measured through both services; prints each."""
    records = []
    print(f"| {' | '.join(SERVICE_COLUMNS)} |\n|{'---|' * len(SERVICE_COLUMNS)}", flush=True)
    sizes = options.max_drafts, options.model, max(options.rows), options.threads
    with ExitStack() as stack:
        drafting = stack.enter_context(Served(options.draft, *sizes, options.device))
        plain = drafting.forbidding() if options.device != "cpu" else stack.enter_context(Served("", *sizes))
        for rows in options.rows:
            for task in options.tasks:
                record = _compare(plain, drafting, task, rows, options)
                numbers = [f"{record[name]:.2f}" for name in ("drafted", "accepted", "plain", "with drafts", "gain")]
                print(f"| {task} | {rows} | {' | '.join(numbers)} | {record['parted']} |", flush=True)
                records.append(record)
    return records


def _compare(plain: Served, drafting: Served, task: str, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the record of one task and number of rows; a token of each answer first, which caches the prompts."""
    for served in (plain, drafting):
        served.answer(PROMPTS[task], rows, 1, options.temperature)
    rounds = [
        [s.answer(PROMPTS[task], rows, options.max_tokens, options.temperature) for s in (plain, drafting)]
        for _ in range(options.rounds)
    ]
    without, drafted = rounds[-1]
    total = sum(map(len, drafted.tokens))
    return {
        "task": task,
        "rows": rows,
        "drafted": round(drafted.drafted / total, 3),
        "accepted": round(drafted.accepted / total, 3),
        "plain": round(statistics.median(one.rate for one, _ in rounds), 2),
        "with drafts": round(statistics.median(other.rate for _, other in rounds), 2),
        "gain": round(statistics.median(other.rate / one.rate for one, other in rounds), 3),
        "parted": sum(one != other for one, other in zip(without.tokens, drafted.tokens, strict=True)),
    }


def row_of(case: Case) -> str:
    """Returns a row of the table in docs/speculation.md."""
    shares = " ".join(f"{share:.2f}" for share in case.acceptance)
    seconds = f"{statistics.median(map(_rate, case.plain)):.1f} | {statistics.median(map(_rate, case.drafted)):.1f}"
    numbers = f"{case.verified_per_row:.1f} | {case.tokens_per_row:.2f} | {seconds} | {case.gain:.2f} | {case.parted}"
    return f"| {case.task} | {case.rows} | {case.drafts} | {shares} | {numbers} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as the runner's setting")
    parser.add_argument("--draft", default="ngram", help="as the runner's setting")
    parser.add_argument("--tasks", nargs="+", choices=[*PROMPTS], default=[*PROMPTS])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="prompts at a time")
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 7], help="drafts of each row")
    parser.add_argument("--max-drafts", type=int, default=7, help="with --service: the runner's setting")
    parser.add_argument("--service", action="store_true", help="measure both services instead of the backend")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="with --service")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    configure_logs("console", "warning")
    records = measure_service(options) if options.service else measure_backend(options)
    if options.json:
        source = provenance("bench.speculation", ("torch", "numpy"))
        write_results(options.json, source, {"service": options.service, "cases": records})


def _no_progress(what: str, share: float) -> None:
    pass


def measure_backend(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a record of each case, measured on the backend alone; prints each."""
    torch.set_num_threads(options.threads)
    backend = TorchBackend.load(
        options.model,
        cache_folder=default_cache_folder(),
        progress=_no_progress,
        num_blocks=640,
        block_size=16,
        num_slots=max(options.rows),
        max_step_tokens=512,
        make_drafter=cpu_drafter(RunnerSettings.read(draft=options.draft), _no_progress),
        max_drafts=max(options.drafts),
    )
    text = ModelText(backend.model)
    prompts = {
        task: [text.encode_prompt(inference_pb2.Prompt(user_message=prompt)) for prompt in PROMPTS[task]]
        for task in options.tasks
    }
    text.close()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    cases = measure(backend, prompts, options, time.thread_time if options.threads == 1 else time.perf_counter)
    return [case.numbers() for case in cases]


if __name__ == "__main__":
    main()
