"""Makes a page from a benchmark's JSON results, on any machine.

    python -m bench.page bench/results/DATE-CARD-kernels.json [--output FILE.html]

Supports the results of `bench.steps` and `bench.kernels`. `roster bench report` writes pages about requests, from
records. Pages are not committed: bench/results keeps one as a sample.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.common.document import Document, document_page
from bench.kernels import page as kernels
from bench.steps import times as step_times

DOCUMENTS: dict[str, Callable[[Mapping[str, Any]], Document]] = {
    "bench.steps": step_times.document,
    "bench.kernels": kernels.document,
}


def page_of(record: Mapping[str, Any]) -> str:
    """Returns the HTML. Raises ValueError for results of another benchmark."""
    module = shlex.split(record["command"])[2]
    if module not in DOCUMENTS:
        raise ValueError(f"there is no page for results of {module}, only for those of {', '.join(DOCUMENTS)}")
    return document_page(DOCUMENTS[module](record), record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--output", type=Path, help="default: beside the results, with .html")
    options = parser.parse_args()
    path = options.output or options.results.with_suffix(".html")
    path.write_text(page_of(json.loads(options.results.read_text())), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
