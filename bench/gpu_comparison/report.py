"""Makes a comparison's pages from its records, on any machine: `python -m bench.gpu_comparison.report FOLDER`."""

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
    "fcfs takes prompts in chunks with decoding rows, orca takes whole prompts, static forms a batch and admits none "
    "until all of it has ended: three policies of Roster on one runner, measured through gRPC. transformers is its own "
    "continuous batching in a process without a server, on the same card after the runner had ended.",
    "Requests that had not ended some seconds after the last arrival were cancelled (see Conditions), because an "
    "overloaded system would occupy the card for long. Latencies and throughput here count only served requests, over "
    "a time that includes the end, in which few are left. The command's own table also counts the tokens of cancelled "
    "requests, and only the time in which requests arrived.",
)


WITHOUT_FLASH = (
    "transformers computed attention by {attention}: flash attention, which its continuous batching prefers, was not "
    "installed. Scores are then computed between all sequences of a step and masked, and keys and values are copied "
    "for every head, so the cost grows with the square of the batch. With flash attention it would be faster."
)


def remarks(runs: Sequence[Run]) -> tuple[str, ...]:
    """Returns the remarks that a reader of these runs needs."""
    ways = {str(way) for run in runs if (way := run.header.settings.get("attention")) and "sdpa" in str(way)}
    return (*NOTES, *(WITHOUT_FLASH.format(attention=way) for way in sorted(ways)))


def write_pages(folder: Path, runs: Sequence[Run]) -> list[Path]:
    """Writes a page about the rates and one about the giant prompt, if there are runs for them; returns their paths."""
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with runs.jsonl.gz, to which the pages are written")
    folder = parser.parse_args().folder
    check_plots()
    runs = read_runs(folder / "runs.jsonl.gz")
    print_table(runs)
    for path in write_pages(folder, runs):
        print(path)


if __name__ == "__main__":
    main()
