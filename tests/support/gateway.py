"""The real `smg` gateway as a process in front of a Roster: its HTTP port serves the OpenAI API."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai

from roster_client.serve.free_ports import free_ports
from tests.support.readiness import wait_ready


@contextmanager
def gateway(folder: Path, *workers: str, policy: str = "round_robin") -> Iterator[str]:
    """Runs a gateway in front of the workers (HOST:PORT each); yields the base URL of its OpenAI API once ready."""
    http, metrics = free_ports(2)
    command = [str(Path(sys.executable).with_name("smg")), "launch", "--host", "127.0.0.1", "--port", str(http)]
    command += ["--worker-urls", *[f"grpc://{worker}" for worker in workers], "--policy", policy]
    command += ["--health-check-interval-secs", "1"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--disable-circuit-breaker"]
    command += ["--retry-max-retries", "2", "--retry-initial-backoff-ms", "10", "--retry-max-backoff-ms", "50"]
    log = folder / "gateway.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{http}/v1"
        wait_ready(process, "the gateway", log, lambda: _is_ready(url))
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # it has no data to lose, and SIGTERM would take it 5 seconds
        process.wait()


@contextmanager
def openai_client(
    folder: Path, *workers: str, timeout_s: float = 60, policy: str = "round_robin"
) -> Iterator[openai.OpenAI]:
    """Yields OpenAI's own client, without retries, for a gateway in front of the workers."""
    with (
        gateway(folder, *workers, policy=policy) as url,
        openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=timeout_s) as opened,
    ):
        yield opened


def _is_ready(url: str) -> bool:
    """Whether a request is answered: the gateway lists a model before it has the model's tokenizer. Raises URLError."""
    with urllib.request.urlopen(f"{url}/models", timeout=2) as answer:
        models = json.load(answer)["data"]
    return bool(models) and _answers(url, models[0]["id"])


def _answers(url: str, model: str) -> bool:
    """Whether a completion works. Raises URLError."""
    body = json.dumps({"model": model, "prompt": "x", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.status == 200
