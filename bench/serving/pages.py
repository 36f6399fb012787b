"""Makes the reports of `bench.serving` from its records: one page per arrival process.

python -m bench.serving.pages bench/results/DATE-cpu-serving         (makes them again from the records)
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from roster_client.bench.records.record import Run
from roster_client.bench.records.record_file import read_run, write_run
from roster_client.bench.records.summary import Targets, summarize
from roster_client.bench.records.summary_table import summary_table
from roster_client.bench.report.html_report import write_report
from roster_client.bench.report.plots import check_plots

TARGETS = Targets(ttft_s=2.0, itl_s=0.25)
"""Goodput targets; two CPU cores take a quarter of a second for a step that prefills."""
AT_ONCE, SPACED = "at-once", "spaced"
TITLES = {
    AT_ONCE: "All requests at once",
    SPACED: "Requests as a trace spaces them",
}
SYSTEMS = ("fcfs", "orca", "static", "transformers, padded batches", "transformers, continuous")
Runs = dict[str, list[Run]]
"""Runs by arrival process, in the order of `SYSTEMS`."""
NOTE = (
    "Same model, same token ids, same slots and threads for all. fcfs, orca and static are policies of Roster on one "
    "runner, measured through gRPC; static forms a batch and admits nothing until all of it has ended. The two "
    "transformers baselines run in a separate process without a server; tokens of a padded batch count when their step "
    "has ended, as if they were streamed, and tokens beyond the requested number do not count."
)


def write_records(folder: Path, runs: Runs) -> None:
    """Writes one file per run."""
    for name, some in runs.items():
        for run in some:
            write_run(records_file(folder, name, run.header.system), run)


def read_records(folder: Path) -> Runs:
    """Reads the files that `write_records` wrote; missing systems are skipped."""
    paths = {name: [records_file(folder, name, system) for system in SYSTEMS] for name in TITLES}
    return {name: [read_run(path) for path in some if path.exists()] for name, some in paths.items()}


def records_file(folder: Path, name: str, system: str) -> Path:
    """Returns the file of one run."""
    return folder / f"{name}-{system.replace(', ', '-').replace(' ', '-')}.jsonl.gz"


def write_pages(folder: Path, runs: Runs, console: Console) -> None:
    """Writes one page per arrival process and all numbers as JSON; prints the tables."""
    numbers: dict[str, Any] = {}
    for name, some in runs.items():
        if not some:
            continue
        numbers |= {f"{name}, {run.header.system}": asdict(summarize(run, TARGETS)) for run in some}
        title = f"{TITLES[name]}: {some[0].header.model}, {some[0].header.workload}"
        write_report(folder / f"{name}.html", title, some, TARGETS, [NOTE])
        console.print(summary_table([(run, summarize(run, TARGETS)) for run in some], title))
    (folder / "summary.json").write_text(json.dumps(numbers, indent=1) + "\n")
    console.print(f"written to {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    check_plots()
    write_pages(folder, read_records(folder), Console())


if __name__ == "__main__":
    main()
