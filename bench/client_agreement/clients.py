"""Runs the two clients as commands and reads their records of each request."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roster_client.bench.records.record_file import read_run

GUIDELLM_SEED = 42
"""Fixed seed from which guidellm draws the gaps between arrivals; ours are drawn in the same way."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One request; times in seconds."""

    ttft_s: float
    """Time from sending the request to its first chunk with text."""
    itl_s: float
    """(last chunk with text - first one) / (output tokens - 1)."""
    output_tokens: int
    began_s: float
    """Time of sending: since the run's start (`roster bench`), or on the machine's clock (guidellm)."""


async def ours(url: str, options: argparse.Namespace, folder: Path) -> list[Answered]:
    """Runs `roster bench serve` and reads its records. Raises RuntimeError if a request failed."""
    out = folder / "ours"
    command = [sys.executable, "-m", "roster_client.cli", "bench", "serve", f"--openai={url}", f"--out={out}"]
    command += [f"--rate={options.rate}", f"--requests={options.requests}", f"--seed={GUIDELLM_SEED}", "--warmup=0"]
    command += [f"--prompt={options.prompt}", f"--output={options.output}", "--card=any"]
    if options.device == "cpu":  # the hash model's bytes are not words
        command.append(f"--tokenizer={folder / 'tokenizer'}")
    await _run(command)
    answered = []
    for request in read_run(out / "run.jsonl.gz").requests:
        if not request.ok:
            raise RuntimeError(f"a request of ours failed: {request.error}")
        ttft_s = request.first_token_s - request.sent_s
        answered.append(Answered(ttft_s, request.tpot_s or 0.0, request.output_tokens, request.sent_s))
    return answered


async def guidellm(url: str, options: argparse.Namespace, folder: Path) -> list[Answered]:
    """Runs guidellm with one worker process and reads its JSON.

    Its default of ten workers would draw equal gaps from equal seeds, each gap ten times in a row. That is not a
    Poisson process, and the requests would meet different waits.
    """
    report = folder / "guidellm.json"
    tokenizer = f"kind=huggingface_auto,model={folder / 'tokenizer'}"
    command = [str(options.guidellm), "run", "--disable-console", f"--tokenizer={tokenizer}"]
    command += [f"--backend=kind=openai_http,target={url.removesuffix('/v1')},request_format=/v1/completions"]
    command += [f"--profile=kind=poisson,rate={options.rate}"]
    command += [f"--constraint=kind=max_requests,count={options.requests}"]
    command += [f"--data=kind=synthetic_text,prompt_tokens={options.prompt},output_tokens={options.output}"]
    command += [f"--output=kind=json,path={report}"]
    await _run(command, GUIDELLM__MAX_WORKER_PROCESSES="1")
    return [
        Answered(
            request["time_to_first_token_ms"] / 1e3,
            request["inter_token_latency_ms"] / 1e3,
            request["output_tokens"],
            request["info"]["timings"]["request_start"],
        )
        for request in json.loads(report.read_text())["benchmarks"][0]["requests"]["successful"]
    ]


async def _run(command: Sequence[str], **environment: str) -> None:
    """Runs the command. Raises RuntimeError with its output if it fails."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | environment
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{output.decode(errors='replace')[-2000:]}")
