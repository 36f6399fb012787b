"""Compares runs: prints a table and draws a picture. Refuses runs that can't be compared, and says why.

    python -m bench.compare RUN.jsonl RUN.jsonl ... [--plot FILE] [--json FILE] [--across-versions]

A difference can be attributed to the systems only if everything else is equal: card, model, workload (including the
divisors of its lengths and arrivals) and library versions. To compare versions on the same card, use
`--across-versions`. Runs of a sweep are grouped by their arrivals; `vs first` compares with the first run of the group.
Runs whose client was the bottleneck are marked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from roster_client.bench.records.record import Run
from roster_client.bench.records.record_file import RecordFileError, read_run
from roster_client.bench.records.summary import Distribution, Summary, summarize

WORKLOAD_SETTINGS = {"prompt_divisor": 1, "output_divisor": 1, "tenants": 1}
"""Settings that belong to the workload, with their defaults; all others belong to the system."""


class Incomparable(ValueError):
    """Raised for runs that can't be compared; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Side:
    """One run in the comparison."""

    name: str
    run: Run
    summary: Summary


def read_sides(paths: Sequence[Path]) -> list[Side]:
    """Reads the runs. Each is named by its system, and also by its file if a system occurs twice under the same
    arrivals.

    Raises RecordFileError or OSError.
    """
    runs = [read_run(path) for path in paths]
    kinds = [(run.header.system, run.header.arrivals) for run in runs]
    return [
        Side(kind[0] if kinds.count(kind) == 1 else f"{kind[0]} ({path.name})", run, summarize(run))
        for path, run, kind in zip(paths, runs, kinds, strict=True)
    ]


def check(sides: Sequence[Side], across_versions: bool) -> None:
    """Raises Incomparable if the runs differ in anything but their systems."""
    for what in ("card", "model", "workload"):
        values = {str(getattr(side.run.header, what)): side.name for side in sides}
        if len(values) > 1:
            found = ", ".join(f"{name} on {value!r}" for value, name in values.items())
            raise Incomparable(f"these runs differ by {what}: {found}. Measure them again on the same {what}.")
    for name, default in WORKLOAD_SETTINGS.items():
        settings = {side.run.header.settings.get(name, default) for side in sides}
        if len(settings) > 1:
            raise Incomparable(f"the workload's {name} differs: {', '.join(map(str, settings))}. Use one of them.")
    for arrivals, group in groups(sides).items():
        asked = {(len(side.run.requests), sum(one.wanted_tokens for one in side.run.requests)) for side in group}
        if len(asked) > 1:
            raise Incomparable(
                f"{arrivals}: these runs had different requests: "
                + ", ".join(f"{count} that wanted {tokens} tokens" for count, tokens in sorted(asked))
            )
    differing = differing_versions(sides)
    if differing and not across_versions:
        raise Incomparable(f"versions differ: {'; '.join(differing)}. To compare versions, pass --across-versions.")


def differing_versions(sides: Sequence[Side]) -> list[str]:
    """Returns one phrase for each package whose version differs between runs."""
    versions: dict[str, set[str]] = {}
    for side in sides:
        for package, version in side.run.header.versions.items():
            versions.setdefault(package, set()).add(version)
    return [f"{package} {' and '.join(sorted(found))}" for package, found in versions.items() if len(found) > 1]


def groups(sides: Sequence[Side]) -> dict[str, list[Side]]:
    """Groups the runs by arrivals, in order of appearance; only runs of one group had the same load."""
    found: dict[str, list[Side]] = {}
    for side in sides:
        found.setdefault(side.run.header.arrivals, []).append(side)
    return found


def table(sides: Sequence[Side]) -> Table:
    """Returns the table, one row per run."""
    header = sides[0].run.header
    view = Table(title=f"{header.model}, {header.workload}, on {header.card}")
    left = ("arrivals", "system")
    for heading in (*left, "ok", "tokens/s", "vs first", "goodput", "TTFT p50", "p99", "ITL p50", "p99", "E2E p50"):
        view.add_column(heading, justify="left" if heading in left else "right")
    for arrivals, group in groups(sides).items():
        first = group[0].summary.output_tokens_per_s
        for side in group:
            summary = side.summary
            view.add_row(
                arrivals,
                side.name + (" (client too slow)" if summary.client.bottleneck else ""),
                f"{summary.ok}/{summary.requests}",
                f"{summary.output_tokens_per_s:,.1f}",
                f"{summary.output_tokens_per_s / first:.2f}×" if first else "-",
                f"{summary.goodput:.2f}/s",
                *(_ms(summary.ttft, point) for point in ("p50", "p99")),
                *(_ms(summary.itl, point) for point in ("p50", "p99")),
                _ms(summary.e2e, "p50"),
            )
        view.add_section()
    return view


def _ms(times: Distribution | None, point: str) -> str:
    return "-" if times is None else f"{getattr(times, point) * 1e3:,.0f} ms"


def plot(path: Path, sides: Sequence[Side]) -> None:
    """Draws one row of panels per arrival process: throughput as bars, TTFT and ITL as cumulative distributions."""
    from matplotlib.figure import Figure

    rows = groups(sides)
    figure = Figure(figsize=(11, 0.5 + 2.8 * len(rows)), layout="constrained")
    styles = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(side.name for side in sides))}
    for (arrivals, group), (bars, ttft, itl) in zip(
        rows.items(), figure.subplots(len(rows), 3, squeeze=False), strict=True
    ):
        bars.barh(
            [side.name for side in group],
            [side.summary.output_tokens_per_s for side in group],
            color=[styles[side.name] for side in group],
        )
        bars.invert_yaxis()
        bars.set(title=arrivals, xlabel="output tokens/s")
        for side in group:
            served = [request for request in side.run.requests if request.ok and request.message_s]
            times = ([one.ttft_s for one in served], [itl_s for one in served for itl_s in one.itls_s])
            for axes, values in zip((ttft, itl), times, strict=True):
                if values:
                    axes.ecdf(values, color=styles[side.name], label=side.name)
        ttft.set(xscale="log", xlabel="TTFT, s", ylabel="share of requests")
        itl.set(xscale="log", xlabel="ITL, s", ylabel="share of tokens")
        ttft.legend(fontsize="x-small")
        for axes in (ttft, itl):
            axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Compares the runs. Exits with status 2 and a message if they can't be compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="files that `roster bench` or `bench.baselines` wrote")
    parser.add_argument(
        "--across-versions", action="store_true", help="allow different library versions on the same card"
    )
    parser.add_argument("--plot", type=Path, help="draw the picture to this file (.png, .svg, .pdf)")
    parser.add_argument("--json", type=Path, help="also write the summaries to this file")
    options = parser.parse_args()
    try:
        sides = read_sides(options.runs)
        check(sides, options.across_versions)
    except (Incomparable, RecordFileError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    for sentence in differing_versions(sides):
        print(f"versions differ: {sentence}")
    Console(width=160).print(table(sides))
    for side in sides:
        if side.summary.client.bottleneck:
            print(f"{side.name}: the client was too slow: {side.summary.client.bottleneck}")
    if options.plot:
        plot(options.plot, sides)
    if options.json:
        record = [
            {"name": side.name, "header": asdict(side.run.header), "summary": asdict(side.summary)} for side in sides
        ]
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
