"""Fails if a piece of the scheduler's or a front worker's work takes more instructions than before.

    python -m bench.check                 compares with bench/expected/instructions.json; exit status 1: slower
    python -m bench.check --renew         stores the new counts; commit them with the change that caused them
    python -m bench.check --against REV   also counts REV, which must contain this check, and compares with it

Counts depend on the versions of Python and of the libraries, and on the processor's features. If those differ from the
stored ones, the counts can't be compared: the exit status is 2; use `--against`. Needs valgrind.
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
    """Raised if the stored counts come from another environment; the message says which."""


def stored(path: Path, here: dict[str, Any]) -> dict[str, float]:
    """Reads the file's counts. Raises Incomparable if they were made in another environment."""
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
            f"{path.name} comes from another environment: {'; '.join(differing)}. Compare with a revision instead "
            "(--against main), or store new counts (--renew)."
        )
    counts: dict[str, float] = record["instructions_per_unit"]
    return counts


def counted_at(revision: str) -> dict[str, float]:
    """Counts another revision in a temporary worktree. Raises CalledProcessError if the revision does not exist."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", tree, revision], check=True)
        try:
            return instructions_per_unit("bench.check.works", root=tree)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)


def show(found: list[Change]) -> None:
    """Prints one line per piece of work."""
    for change in found:
        before = f"{change.before:>14,.0f}" if change.before is not None else f"{'':>14}"
        ratio = f"{change.ratio - 1:>+8.1%}" if change.ratio is not None else f"{'':>8}"
        print(f"{change.name:28}{before}{change.now:>14,.0f}{ratio}  {change.verdict.value}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--renew", action="store_true", help="store the counts instead of comparing them")
    parser.add_argument("--against", metavar="REV", help="compare with this revision instead of the stored counts")
    parser.add_argument("--expected", type=Path, default=EXPECTED, help="the stored counts")
    parser.add_argument(
        "--slowdown", type=float, default=0.0, help="add this share to the cost of the work, to test the check"
    )
    return parser.parse_args()


def main() -> None:
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
