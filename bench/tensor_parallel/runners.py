"""Serves one model by several single runners under one scheduler, each with a GPU, against one of them.

    python -m bench.tensor_parallel.runners --runners 1 4 --shape llama-3.1-8b

All requests of a run arrive at once, `--requests` for each runner, so that every runner has as many. Tokens a second of
the whole service are from the first to the last token; beside them are the gaps between a stream's tokens and the times
to its first one. `--device hash` tries the command on a CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench.common.fleet import Fleet
from bench.common.on_gpu import require_gpu
from bench.common.provenance import on_card, provenance, write_results
from bench.common.random_model import ALL_SHAPES, write_folder
from bench.gpu_serving.client import ClientRecord, Clients
from bench.gpu_serving.service import card_of
from roster_client.client import RosterClient
from roster_client.client.admin import AdminClient

NAMES = "abcdefgh"


def figures(record: ClientRecord) -> dict[str, float]:
    """Returns tokens a second, gaps between tokens and times to the first one, in milliseconds."""
    order = np.lexsort((record.delta_times, record.delta_requests))
    requests, times = record.delta_requests[order], record.delta_times[order] / 1e6
    first = np.flatnonzero(np.diff(requests, prepend=-1))
    gaps = np.diff(times)[np.diff(requests) == 0]
    waits = times[first] - record.sent[requests[first]] / 1e6
    seconds = (times.max() - times.min()) / 1e3
    return {
        "tokens_per_s": float(record.delta_tokens.sum() / seconds),
        "gap_ms_p50": float(np.percentile(gaps, 50)),
        "gap_ms_p99": float(np.percentile(gaps, 99)),
        "first_ms_p50": float(np.percentile(waits, 50)),
    }


async def measured(arguments: argparse.Namespace, folder: Path, count: int) -> dict[str, Any]:
    """Serves by `count` runners, loads them and returns the figures."""
    settings: dict[str, object] = {"device": arguments.device, "model": "hash"}
    if arguments.device == "cuda":
        settings |= {"model": folder, "weights": "random", "slots": arguments.requests}
    fleet = Fleet(settings, gpus=count if arguments.device == "cuda" else 1)
    total = count * arguments.requests
    try:
        for name in ("scheduler", *NAMES[:count]):
            await fleet.start(name)
        ends = fleet.endpoints
        async with RosterClient(ends.listen) as client, AdminClient(ends.admin_listen) as admin:
            model = await fleet.ready(client, admin, count)
        for warm in (True, False):
            lengths = [(arguments.prompt, 8 if warm else arguments.tokens)] * total
            clients = Clients(ends.listen, lengths, model.vocab_size, int(warm))
            record = await clients.run([0.0] * total, min(8, total))
        return {"runners": count, "requests": total, **figures(record)}
    finally:
        await fleet.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runners", type=int, nargs="+", choices=range(1, len(NAMES) + 1), default=[1, 4])
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--device", choices=("cuda", "hash"), default="cuda", help="hash: to try the command on a CPU")
    parser.add_argument("--requests", type=int, default=128, help="of each runner (default: 128)")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    require_gpu(arguments.device)
    source = provenance("bench.tensor_parallel.runners", ["torch", "cupy", "numpy"], None)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        write_folder(arguments.shape, Path(folder))
        for count in arguments.runners:
            line = uvloop.run(measured(arguments, Path(folder), count))
            lines.append(line)
            share = line["tokens_per_s"] / lines[0]["tokens_per_s"]
            print(
                f"{count} runners: {line['tokens_per_s']:.0f} tokens/s, {share:.2f} of the first; gaps p50 "
                f"{line['gap_ms_p50']:.2f}, p99 {line['gap_ms_p99']:.2f} ms; first token p50 "
                f"{line['first_ms_p50']:.0f} ms",
                flush=True,
            )
    if arguments.output:
        write_results(arguments.output, on_card(source, card_of(arguments.device)), {"lines": lines})


if __name__ == "__main__":
    main()
