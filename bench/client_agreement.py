"""Does an independent client measure the same? guidellm and `roster bench` against one OpenAI endpoint, turn by turn.

    pip install guidellm==0.8.1   (in a virtual environment of its own: its dependencies are not ours)
    python -m bench.client_agreement --guidellm VENV/bin/guidellm [--device hash] [--requests 100] [--json FILE]

Both drive the gateway in front of Roster: streamed completions, greedy, requests of one length arriving evenly. They
take turns, ours first, so that a machine whose speed drifts does not favour one. Definitions, the same for both:

    TTFT  from sending a request to its first chunk with text
    ITL   (last chunk with text - first one) / (output tokens - 1) of a request; guidellm's inter_token_latency
    tokens by the server's count (usage), in both

`roster bench` itself counts TTFT from the time at which a request should have left, and pools the latencies of all
tokens; that differs by what the client is late, and is printed beside it. The default runner is the hash model, whose
steps sleep `--step-ms`, whatever a prompt's length: the endpoint's times then hardly depend on what else the machine
does. Exit status 1 when a mean or median differs by more than 10%.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.provenance import provenance
from roster_client.bench.record_file import read_run
from roster_client.stack import Endpoints, Stack
from runner_svc.byte_tokenizer import build_byte_tokenizer
from runner_svc.model.source import model_folder
from runner_svc.settings import default_cache_folder
from tests.support.gateway import gateway

BAR = 0.10
READY_TIMEOUT_S = 300.0
POINTS: dict[str, Callable[[np.ndarray], float]] = {
    "mean": lambda values: float(values.mean()),
    "p50": lambda values: float(np.percentile(values, 50)),
    "p90": lambda values: float(np.percentile(values, 90)),
}
JUDGED = ("mean", "p50")


@dataclass(slots=True)
class Measured:
    """What one client measured, in seconds, a value a request."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    output_tokens: int = 0


def ours(url: str, options: argparse.Namespace, folder: Path, turn: int, into: Measured) -> None:
    """One turn of `roster bench serve`, from its records. Raises CalledProcessError when it fails."""
    trace = folder / "even.csv"
    rows = [f"{number / options.rate:.6f},{options.prompt},{options.output}" for number in range(options.requests)]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    out = folder / f"ours-{turn}"
    command = [sys.executable, "-m", "roster_client.cli", "bench", "serve", f"--openai={url}", f"--trace={trace}"]
    command += [f"--requests={options.requests}", f"--out={out}", "--card=any"]
    if options.device == "cpu":  # the hash model's bytes are no words
        command.append(f"--tokenizer={folder / 'tokenizer'}")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (file,) = out.glob("*.jsonl*")
    for request in read_run(file).requests:
        if not request.ok:
            raise RuntimeError(f"a request of ours failed: {request.error}")
        into.ttft_s.append(request.first_token_s - request.sent_s)
        into.itl_s.append(request.tpot_s or 0.0)
        into.output_tokens += request.output_tokens


def theirs(url: str, options: argparse.Namespace, folder: Path, turn: int, into: Measured) -> None:
    """One turn of guidellm, from its JSON. Raises CalledProcessError when it fails."""
    report = folder / f"theirs-{turn}.json"
    tokenizer = f"kind=huggingface_auto,model={folder / 'tokenizer'}"
    command = [str(options.guidellm), "run", "--disable-console", f"--tokenizer={tokenizer}"]
    command += [f"--backend=kind=openai_http,target={url.removesuffix('/v1')},request_format=/v1/completions"]
    command += [f"--profile=kind=constant,rate={options.rate}"]
    command += [f"--constraint=kind=max_requests,count={options.requests}"]
    command += [f"--data=kind=synthetic_text,prompt_tokens={options.prompt},output_tokens={options.output}"]
    command += [f"--output=kind=json,path={report}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for request in json.loads(report.read_text())["benchmarks"][0]["requests"]["successful"]:
        into.ttft_s.append(request["time_to_first_token_ms"] / 1e3)
        into.itl_s.append(request["inter_token_latency_ms"] / 1e3)
        into.output_tokens += request["output_tokens"]


async def measure(options: argparse.Namespace) -> dict[str, Measured]:
    """Both clients, taking turns."""
    results = {"ours": Measured(), "guidellm": Measured()}
    runner: dict[str, object] = {"device": options.device, "slots": options.slots}
    runner |= {"step_ms": options.step_ms} if options.device == "hash" else {"model": options.model}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with Stack(Endpoints.free(), scheduler={}, runner=runner) as stack:
            await stack.wait_ready(READY_TIMEOUT_S)
            write_tokenizer(options, folder / "tokenizer")
            with gateway(folder, stack.endpoints.listen) as url:
                for turn in range(options.turns):
                    await asyncio.to_thread(ours, url, options, folder, turn, results["ours"])
                    await asyncio.to_thread(theirs, url, options, folder, turn, results["guidellm"])
    return results


def write_tokenizer(options: argparse.Namespace, folder: Path) -> None:
    """The served model's tokenizer, as transformers loads it."""
    if options.device == "cpu":
        folder.symlink_to(model_folder(options.model, default_cache_folder(), lambda *_: None))
        return
    folder.mkdir()
    build_byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def compared(results: dict[str, Measured]) -> list[dict[str, Any]]:
    """A row a measure and point, times in ms; `difference` is guidellm's over ours, less 1."""
    rows = []
    for measure_name in ("ttft_s", "itl_s"):
        for point, of in POINTS.items():
            here, there = (of(np.array(getattr(results[name], measure_name))) for name in ("ours", "guidellm"))
            rows.append(
                {
                    "measure": f"{measure_name.removesuffix('_s').upper()} {point}",
                    "ours_ms": round(here * 1e3, 2),
                    "guidellm_ms": round(there * 1e3, 2),
                    "difference": round(there / here - 1, 4),
                    "judged": point in JUDGED,
                }
            )
    return rows


def main() -> None:
    """Measures, prints, judges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", type=Path, required=True, help="the program of guidellm")
    parser.add_argument("--device", choices=("hash", "cpu"), default="hash")
    parser.add_argument("--model", default="smollm2", help="with --device cpu")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the hash model")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--output", type=int, default=32, help="tokens")
    parser.add_argument("--requests", type=int, default=80, help="a turn")
    parser.add_argument("--turns", type=int, default=2, help="of each client")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    options = parser.parse_args()
    version = subprocess.run([options.guidellm, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    results = asyncio.run(measure(options))
    rows = compared(results)
    print(f"{version}\n{'':10}{'ours, ms':>10}{'guidellm, ms':>14}{'difference':>12}")
    for row in rows:
        print(f"{row['measure']:10}{row['ours_ms']:>10.2f}{row['guidellm_ms']:>14.2f}{row['difference']:>+12.1%}")
    counts = {name: {"requests": len(one.ttft_s), "output_tokens": one.output_tokens} for name, one in results.items()}
    print(counts)
    if options.json:
        source = provenance("bench.client_agreement", ("smg", "aiohttp"))
        record = {**source, "guidellm": version, "counts": counts, "rows": rows}
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    sys.exit(any(row["judged"] and abs(row["difference"]) > BAR for row in rows))


if __name__ == "__main__":
    main()
