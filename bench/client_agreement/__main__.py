"""Compares guidellm and `roster bench`, which load one OpenAI endpoint at the same time.

    pip install guidellm==0.8.1   (in a separate virtual environment: its dependencies differ from Roster's)
    python -m bench.client_agreement --guidellm VENV/bin/guidellm [--device hash] [--requests 100] [--json FILE]

Both load the gateway in front of Roster: streamed completions, greedy, requests of one length, Poisson arrivals with
the same gaps (guidellm draws them from seed 42). They run at the same time, so that both meet the same load: a shared
machine varies more from minute to minute than the clients differ. Only requests that began while both were sending
count. Definitions, the same for both:

    TTFT  from the request's head to the first chunk with text (guidellm stamps the write of the head, after connecting;
          `roster bench` the moment before it connects)
    ITL   (last chunk with text - first one) / (output tokens - 1) of a request; guidellm's inter_token_latency
    tokens by the server's count (usage), in both

`roster bench` reports TTFT from the time at which a request was due, and pools the latencies of all tokens; the
difference is the client's delay in sending. A proxy (the witness) between each client and the gateway records when the
bytes passed. The part of a client's TTFT that exceeds the wire's is the client's own; where the wires differ, the
clients' requests met different waits. The default runner is the hash model, whose steps sleep `--step-ms` whatever the
prompt's length, so the endpoint's times hardly depend on other load of the machine. The exit status is 1 if a mean or
median differs by more than 10%.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from bench.client_agreement.clients import guidellm, ours
from bench.client_agreement.comparison import BAR, Side, compared, overlapping, print_rows
from bench.client_agreement.witness import Witness
from bench.common.provenance import provenance, write_results
from roster_client.serve.stack import Endpoints, Stack
from runner_svc.backends.byte_tokenizer import build_byte_tokenizer
from runner_svc.catalog.source import model_folder
from runner_svc.settings.runner_settings import default_cache_folder
from tests.support.gateway import gateway

READY_TIMEOUT_S = 300.0


async def measure(options: argparse.Namespace) -> dict[str, Side]:
    """Runs both clients at once. Returns, by client, the requests that began while both were sending."""
    runner: dict[str, object] = {"device": options.device, "slots": options.slots}
    test_backend = json.dumps({"step_ms": options.step_ms})
    runner |= {"test_backend": test_backend} if options.device == "hash" else {"model": options.model}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with Stack(Endpoints.free(), scheduler={}, runner=runner) as stack:
            await stack.wait_ready(READY_TIMEOUT_S)
            write_tokenizer(options, folder / "tokenizer")
            with gateway(folder, stack.endpoints.listen) as url:
                return await side_by_side(options, folder, urlsplit(url).port or 80)


async def side_by_side(options: argparse.Namespace, folder: Path, port: int) -> dict[str, Side]:
    """Starts `roster bench` when guidellm, which takes longer to start, sends its first request."""
    async with Witness(port) as by_theirs, Witness(port) as by_ours:
        their_run = asyncio.create_task(guidellm(by_theirs.url, options, folder))
        began = asyncio.create_task(by_theirs.began.wait())
        await asyncio.wait((their_run, began), return_when=asyncio.FIRST_COMPLETED)
        began.cancel()
        our_answers = await ours(by_ours.url, options, folder)
        return overlapping(our_answers, by_ours.seen, await their_run, by_theirs.seen)


def write_tokenizer(options: argparse.Namespace, folder: Path) -> None:
    """Writes the served model's tokenizer in the form that transformers loads."""
    if options.device == "cpu":
        folder.symlink_to(model_folder(options.model, default_cache_folder(), lambda *_: None))
        return
    folder.mkdir()
    build_byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", type=Path, required=True, help="path of the guidellm program")
    parser.add_argument("--device", choices=("hash", "cpu"), default="hash")
    parser.add_argument("--model", default="smollm2", help="with --device cpu")
    parser.add_argument("--step-ms", type=float, default=20.0, help="duration of the hash model's steps")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second of each client")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--output", type=int, default=32, help="tokens")
    parser.add_argument("--requests", type=int, default=200, help="requests of each client")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    return parser.parse_args()


def main() -> None:
    """Measures, prints the comparison and exits with status 1 if the clients disagree."""
    options = parse_options()
    version = subprocess.run([options.guidellm, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    sides = asyncio.run(measure(options))
    rows = compared(sides)
    print(version)
    print_rows(rows, sides)
    if options.json:
        source = provenance("bench.client_agreement", ("smg", "aiohttp"))
        counts = {name: side.counts for name, side in sides.items()}
        write_results(options.json, source, {"guidellm": version, "counts": counts, "rows": rows})
    sys.exit(any(row["judged"] and abs(row["difference"]) > BAR for row in rows))


if __name__ == "__main__":
    main()
