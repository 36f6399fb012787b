"""The pages about a comparison, from its records, on any machine: `python -m bench.gpu_comparison.report FOLDER`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.gpu_comparison.loads import GIANT
from bench.gpu_comparison.table import print_table, sentence, targets_of
from roster_client.bench.records.record import Run
from roster_client.bench.records.record_file import read_runs
from roster_client.bench.report.html_report import write_report
from roster_client.bench.report.plots import check_plots

NOTES = (
    "fcfs takes prompts in chunks beside decoding rows, orca whole prompts, static forms a batch and takes nobody in "
    "until all of it has ended: three policies of Roster on one runner, measured through gRPC. transformers is its own "
    "continuous batching in a process without a server between, on the same card after the runner had left it.",
    "Requests that had not ended some seconds after the last arrival were given up (see Conditions): a system under "
    "more load than it serves would keep the card for long. Latencies and throughput here are those of served "
    "requests, over a time that includes the end, in which few are left; the command's own table counts what came of "
    "the others too, and tokens while requests arrived.",
)


WITHOUT_FLASH = (
    "transformers computed attention by {attention}: flash attention, which its continuous batching prefers, was not "
    "installed. Scores are then computed between all sequences of a step and masked, and keys and values are copied "
    "for every head: what it needs grows with the square of the batch. With flash attention it would be faster."
)


def remarks(runs: Sequence[Run]) -> tuple[str, ...]:
    """What a reader must know of these."""
    ways = {str(way) for run in runs if (way := run.header.settings.get("attention")) and "sdpa" in str(way)}
    return (*NOTES, *(WITHOUT_FLASH.format(attention=way) for way in sorted(ways)))


def write_pages(folder: Path, runs: Sequence[Run]) -> list[Path]:
    """A page about the rates and one about the giant prompt, as far as there are runs; returns them."""
    swept = [run for run in runs if run.header.settings["load"] != GIANT]
    disturbed = [run for run in runs if run.header.settings["load"] == GIANT]
    written = []
    for name, title, some, notes in (
        ("rates", "Rates up to saturation", swept, ()),
        ("giant", "A giant prompt among chats", disturbed, [f"{sentence(run)}." for run in disturbed]),
    ):
        if some:
            path = folder / f"{name}.html"
            header = some[0].header
            said = (*remarks(some), *notes)
            write_report(path, f"{title}: {header.model}, {header.workload}", some, targets_of(some[0]), said)
            written.append(path)
    return written


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with runs.jsonl.gz; the pages come there")
    folder = parser.parse_args().folder
    check_plots()
    runs = read_runs(folder / "runs.jsonl.gz")
    print_table(runs)
    for path in write_pages(folder, runs):
        print(path)


if __name__ == "__main__":
    main()
