"""The real `smg` gateway as a process in front of a Roster: its HTTP port serves the OpenAI API."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roster_client.stack import free_ports

READY_S = 60.0


@contextmanager
def gateway(folder: Path, *workers: str, policy: str = "round_robin") -> Iterator[str]:
    """A gateway in front of the workers (HOST:PORT each); yields the base URL of its OpenAI API, ready."""
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
        _wait_ready(process, f"http://127.0.0.1:{http}/v1", log)
        yield f"http://127.0.0.1:{http}/v1"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # it has nothing to lose, and leaves politely after 5 seconds only
        process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Waits until a request is answered: the gateway lists a model before it has the model's tokenizer."""
    deadline = time.monotonic() + READY_S
    while True:
        assert process.poll() is None, f"the gateway ended\n{log.read_text(errors='replace')[-4000:]}"
        assert time.monotonic() < deadline, f"the gateway is not ready\n{log.read_text(errors='replace')[-4000:]}"
        try:
            with urllib.request.urlopen(f"{url}/models", timeout=2) as answer:
                models = json.load(answer)["data"]
            if models and _answers(url, models[0]["id"]):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            pass
        time.sleep(0.1)


def _answers(url: str, model: str) -> bool:
    """Whether a completion works. Raises URLError."""
    body = json.dumps({"model": model, "prompt": "x", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.status == 200
