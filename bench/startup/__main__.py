"""Starts a runner with empty caches and again with warm ones, and prints the seconds of each phase.

    python -m bench.startup --shape llama-3.1-8b --folder /dev/shm/model --seconds 105
    python -m bench.startup --formats none fp8 fp8-block int4

Writes a random checkpoint of the shape, which stays in the page cache, and removes it at the end. A folder that has a
model already is only read. Needs no scheduler: the runner is ended once it is ready. `--reading` also reads the weights
in several ways, without a runner. `--formats none fp8 int4` starts none: it loads the weights in these formats, for the
seconds and the peak memory of each.
"""

from __future__ import annotations

import argparse
import json
import pstats
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.common.on_gpu import require_gpu
from bench.common.random_model import ALL_SHAPES, write_folder
from bench.startup.random_checkpoint import write_checkpoint
from runner_svc.weights.on_load import ON_LOAD

FORMATS = ("none", *ON_LOAD)
_EVENTS = (
    "timings of an earlier start are used",
    "the timings are kept for the next start",
    "loaded the kernels",
    "measured the steps",
    "started",
)


def start(folder: Path, cache: Path, flags: list[str], until_at: float, profile: Path | None = None) -> dict[str, Any]:
    """Starts a runner until it is ready; returns the fields of the line about its phases, or {} without one.

    `profile`: a file for a profile of its main thread.
    """
    profiler = ["-m", "cProfile", "-o", str(profile)] if profile is not None else []
    command = [sys.executable, *profiler, "-m", "runner_svc.main", "--model", str(folder), "--cache-dir", str(cache)]
    command += ["--link", "tcp://127.0.0.1:1", "--log-format", "json", *flags]
    began_at = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found: dict[str, Any] = {}
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith("{"):
            print(f"  {line.rstrip()[:300]}", flush=True)
            continue
        fields = json.loads(line)
        event = fields.pop("event", "")
        if event in _EVENTS or fields.get("level") in ("warning", "error"):
            shown = {name: value for name, value in fields.items() if name not in ("timestamp", "level")}
            print(f"  {event}: {shown}", flush=True)
        if event == "started":
            found = fields
        if event == "ready":
            print(f"  ready after {time.monotonic() - began_at:.2f} s", flush=True)
            break
        if time.monotonic() > until_at:
            print(f"  no time is left; last line: {event}", flush=True)
            break
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
    return found


def is_missing(folder: Path) -> bool:
    """Returns whether the model is to be written, False if it is there. Exits for a folder with other files."""
    if (folder / "config.json").exists():
        return False
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} has files but no config.json: name a model, or a folder that is empty or missing")
    return True


def wait_for(writing: threading.Thread) -> None:
    """Waits for the checkpoint, if it is being written."""
    if writing.is_alive():
        began_at = time.monotonic()
        writing.join()
        print(f"waited {time.monotonic() - began_at:.1f} s for the checkpoint", flush=True)


def print_profile(profile: Path) -> None:
    """Prints the functions that took most time, by themselves and with what they called."""
    stats = pstats.Stats(str(profile))
    for order, count in (("tottime", 16), ("cumtime", 60)):
        for key in stats.sort_stats(order).fcn_list[:count]:  # type: ignore[attr-defined]
            _, calls, own, whole, _ = stats.stats[key]  # type: ignore[attr-defined]
            file = "/".join(Path(key[0]).parts[-2:])
            print(f"  {order} {own:6.2f} {whole:6.2f} s {calls:7} {file}:{key[1]} {key[2][:60]}", flush=True)


def parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/roster-model"), help="a model, or a new folder")
    parser.add_argument("--seconds", type=float, default=300.0, help="for everything")
    parser.add_argument("--warm", type=int, default=2, help="starts with warm caches")
    parser.add_argument("--cache", type=Path, help="folder of caches, which stays: if it is there, all starts are warm")
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, help="load the weights in these formats, without a start"
    )
    parser.add_argument("--reading", action="store_true", help="read the weights in several ways, too")
    parser.add_argument("--profile", action="store_true", help="start once more, with a profile")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="first start with weights made up, while the checkpoint is written; later ones use its kernels alone",
    )
    parser.add_argument("--keep", action="store_true", help="keep a folder that was written")
    parser.add_argument("flags", nargs="*", help="of the runner, behind --")
    return parser


def starts(arguments: argparse.Namespace, writing: threading.Thread, until_at: float) -> None:
    """Starts a runner with empty caches and then with warm ones."""
    with tempfile.TemporaryDirectory() as scratch:
        cache, profile = arguments.cache or Path(scratch) / "cache", Path(scratch) / "profile"
        for number in range(1 if cache.exists() else 0, 1 + arguments.warm):
            print(f"start with {'warm' if number else 'empty'} caches:", flush=True)
            made_up = ["--weights", "random"] if arguments.quick and not number else []
            start(arguments.folder, cache, [*made_up, *arguments.flags], until_at)
            wait_for(writing)
        if arguments.reading:
            from bench.startup.reading import WAYS, time_ways

            time_ways(arguments.folder, WAYS, until_at - 5)
        if arguments.profile and time.monotonic() < until_at - 15:
            start(arguments.folder, cache, arguments.flags, until_at, profile)
            print_profile(profile)


def main() -> None:
    arguments = parser().parse_args()
    until_at = time.monotonic() + arguments.seconds
    if "cpu" not in arguments.flags:
        require_gpu(kernels=False)
    is_new = is_missing(arguments.folder)
    if is_new:
        write_folder(arguments.shape, arguments.folder)
    writing = threading.Thread(target=write_checkpoint, args=(arguments.shape, arguments.folder))
    if is_new:
        writing.start()
    if not arguments.quick:
        wait_for(writing)
    if arguments.formats:
        from bench.startup.formats import time_formats

        wait_for(writing)
        time_formats(arguments.folder, arguments.formats, until_at - 5)
    else:
        starts(arguments, writing, until_at)
    if is_new and not arguments.keep:
        shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
