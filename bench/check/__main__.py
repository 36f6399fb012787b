"""Fails when a piece of the scheduler's or a front worker's work takes more instructions than it did.

    python -m bench.check                 compares with bench/expected/instructions.json; exit status 1: slower
    python -m bench.check --renew         stores what was counted: commit it with the change that it belongs to
    python -m bench.check --against REV   counts REV too, which must have this check, and compares with that

Counts depend on the versions of Python and of the libraries, and on the processor's features. Where those differ from
the stored ones nothing can be said: exit status 2, use `--against`. Needs valgrind.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.check.counting import ROOT, NoCounter, instructions_per_unit
from bench.check.verdict import Change, Verdict, changes
from bench.common.provenance import provenance

EXPECTED = ROOT / "bench" / "expected" / "instructions.json"
PACKAGES = ("numpy", "protobuf", "grpcio", "tokenizers")
SLOWER, INCOMPARABLE = 1, 2
"""Exit statuses."""


class Incomparable(RuntimeError):
    """The stored counts come from another environment; the message says which."""


def stored(path: Path, here: dict[str, Any]) -> dict[str, float]:
    """Counts of the file. Raises Incomparable unless they were made in this environment."""
    record = json.loads(path.read_text())
    differing = [
        f"{name} {then} then, {now} now"
        for name, then, now in (
            ("processor", record["processor"], here["processor"]),
            *((name, version, here["versions"].get(name)) for name, version in record["versions"].items()),
        )
        if then != now
    ]
    if differing:
        raise Incomparable(
            f"{path.name} can't be compared with: {'; '.join(differing)}. Compare with a revision instead "
            "(--against main), or store new counts (--renew)."
        )
    counts: dict[str, float] = record["instructions_per_unit"]
    return counts


def counted_at(revision: str) -> dict[str, float]:
    """Counts of another revision, in a worktree of its own. Raises CalledProcessError when there is none."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", tree, revision], check=True)
        try:
            return instructions_per_unit("bench.check.works", root=tree)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)


def show(found: list[Change]) -> None:
    """A line for each work."""
    for change in found:
        before = f"{change.before:>14,.0f}" if change.before is not None else f"{'':>14}"
        ratio = f"{change.ratio - 1:>+8.1%}" if change.ratio is not None else f"{'':>8}"
        print(f"{change.name:28}{before}{change.now:>14,.0f}{ratio}  {change.verdict.value}")


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--renew", action="store_true", help="store the counts instead of comparing them")
    parser.add_argument("--against", metavar="REV", help="compare with this revision instead of the stored counts")
    parser.add_argument("--expected", type=Path, default=EXPECTED, help="the stored counts")
    parser.add_argument("--slowdown", type=float, default=0.0, help="make the work so much dearer, to see it noticed")
    return parser.parse_args()


def main() -> None:
    """Entry point."""
    options = parse_options()
    here = provenance("bench.check", PACKAGES)
    try:
        before: dict[str, float] = {}
        if options.against:
            before = counted_at(options.against)
        elif not options.renew:
            before = stored(options.expected, here)
        now = instructions_per_unit("bench.check.works", [f"--slowdown={options.slowdown}"])
    except (Incomparable, NoCounter) as error:
        print(error, file=sys.stderr)
        sys.exit(INCOMPARABLE)
    found = changes(before, now)
    show(found)
    if options.renew:
        options.expected.parent.mkdir(exist_ok=True)
        options.expected.write_text(json.dumps({**here, "instructions_per_unit": now}, indent=2) + "\n")
    elif any(change.verdict is Verdict.SLOWER for change in found):
        sys.exit(SLOWER)


if __name__ == "__main__":
    main()
