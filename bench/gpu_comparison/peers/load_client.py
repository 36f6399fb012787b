"""One of the processes that send a load: `python -m bench.gpu_comparison.peers.load_client JOB SHARE SHARES RECORD`.

JOB is a JSON file that `load.Job` wrote. The process takes every SHARES-th request from SHARE on, sends a first request
that does not count, creates the file JOB.ready-SHARE, waits for JOB.start with the start on the machine's monotonic
clock, sends each request when it is due, and writes what it saw to RECORD.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import numpy as np
import uvloop

from bench.gpu_comparison.peers.workloads import Recipe, workload
from roster_client.bench.load.grpc_target import GrpcTarget
from roster_client.bench.load.load_run import LEAD_S, LoadRun
from roster_client.bench.load.openai_target import OpenAITarget
from roster_client.bench.load.target import Answer, RequestFailed, Take, Target
from roster_client.bench.load.workload import LoadRequest
from roster_client.bench.records.record import Run, RunHeader, Status
from roster_client.bench.records.record_file import write_run

POLL_S = 0.005
FIRST_PROMPT, FIRST_OUTPUT = 16, 4
_STREAM = {"stream_options": {"include_usage": True}, "skip_special_tokens": False}
_WHOLE = {"stream": False, "stream_options": None}


class CompletionsTarget:
    """An OpenAI-compatible server whose answers are streamed, or come whole where only their end matters.

    A server that writes each token of hundreds of requests as an event of its own is slowed by that, not by its engine.
    """

    def __init__(self, address: str, model: str, whole: bool) -> None:
        """`whole`: no answer is streamed; otherwise only those of requests with several prompts are not."""
        self._whole = whole
        base_url = f"http://{address}/v1"
        self._streaming = OpenAITarget(base_url, model, extra_body=_STREAM)
        self._at_end = OpenAITarget(base_url, model, extra_body=_STREAM | _WHOLE)
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """URL to which requests are posted."""
        return self._streaming.url

    def prepare(self, request: LoadRequest) -> tuple[int, bytes]:
        """Returns the number of prompts of a request whose answer comes whole, otherwise 0, and the body."""
        prompts = len(request.prompt) if not isinstance(request.prompt, str) and request.prompt.ndim == 2 else 1
        whole = self._whole or prompts > 1
        return prompts if whole else 0, (self._at_end if whole else self._streaming).prepare(request)

    async def serve(self, prepared: tuple[int, bytes], take: Take) -> Answer:
        """Posts the body and reads the answer to its end; tokens count per prompt. Raises RequestFailed."""
        prompts, body = prepared
        return await (self._answer(prompts, body, take) if prompts else self._streaming.serve(body, take))

    async def _answer(self, prompts: int, body: bytes, take: Take) -> Answer:
        assert self._session is not None, "use the target in an `async with`"
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(self.url, data=body, headers=headers) as response:
                text = await response.text()
                if response.status != 200:
                    raise RequestFailed(Status.FAILED, f"HTTP {response.status}: {text[:300].strip()}")
                usage = json.loads(text)["usage"]
        except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            raise RequestFailed(Status.FAILED, f"{type(error).__name__}: {error}") from None
        tokens = int(usage["completion_tokens"]) // prompts
        take(tokens)
        return Answer(int(usage["prompt_tokens"]) // prompts, tokens)

    async def __aenter__(self) -> Self:
        await self._streaming.__aenter__()
        unlimited = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=unlimited, timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
        await self._streaming.__aexit__(kind, error, trace)


def target_of(job: dict[str, Any]) -> Target[Any]:
    """Returns the server of a job."""
    if job["protocol"] == "grpc":
        return GrpcTarget(job["address"])
    return CompletionsTarget(job["address"], job["model"], job["whole"])


async def send(job: dict[str, Any], share: int, shares: int, path: Path) -> Run:
    """Sends this process's requests when they are due. Raises RequestFailed if the first, uncounted one fails."""
    recipe = Recipe.from_plain(job["recipe"])
    made = workload(recipe, job["decode_rows"], f"{job['nonce']}-")
    requests = list(made.requests[share::shares])
    rng = np.random.default_rng([job["nonce"], share])
    ids = rng.integers(256, recipe.vocab_size, FIRST_PROMPT).astype(np.int32)
    first = LoadRequest(f"{job['nonce']}-first-{share}", 0.0, ids, FIRST_PROMPT, FIRST_OUTPUT)
    header = RunHeader(job["protocol"], job["address"], job["model"], made.name, made.arrivals, "", "")
    async with target_of(job) as target:
        await target.serve(target.prepare(first), lambda _: None)
        load = LoadRun(target, requests)
        path.with_name(f"{path.name}.ready-{share}").touch()
        start_s = await _start_s(path)
        await asyncio.sleep(max(0.0, start_s - LEAD_S - time.monotonic()))
        await load.run()
    return Run(header, load.records, loop_delays=load.loop_delays)


async def _start_s(path: Path) -> float:
    """Waits for the common start, a time of the monotonic clock."""
    start = path.with_name(f"{path.name}.start")
    while not start.exists():
        await asyncio.sleep(POLL_S)
    return float(start.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("share", type=int)
    parser.add_argument("shares", type=int)
    parser.add_argument("record", type=Path)
    arguments = parser.parse_args()
    job = json.loads(arguments.job.read_text())
    try:
        run = uvloop.run(send(job, arguments.share, arguments.shares, arguments.job))
    except RequestFailed as failure:
        parser.exit(1, f"the first request failed: {failure}\n")
    write_run(arguments.record, run)


if __name__ == "__main__":
    main()
