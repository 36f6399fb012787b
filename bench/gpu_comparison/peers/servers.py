"""The servers under load, with random weights: Roster's two services, or vLLM's server and its engine."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.common import quantization
from bench.common.random_model import ALL_SHAPES, write_folder
from bench.gpu_comparison.peers.load import Server
from bench.gpu_comparison.peers.log import Log
from bench.gpu_comparison.peers.parts import PEERS, SAME_BITS, TUNED, VLLM_SAME_BITS, VLLM_SMALL
from bench.gpu_comparison.peers.site import WORK, environment, version
from roster_client.bench.runs.service_watch import service_settings
from roster_client.serve.child_process import ChildProcess
from roster_client.serve.free_ports import free_ports
from roster_client.serve.stack import Endpoints, NotReadyError, ServiceDiedError, Stack

CONTEXT_LENGTH = 8192
POLL_S = 0.1
STOP_S = 15.0
TAIL_LINES = 4
_TUNED_FLAGS: dict[str, dict[str, object]] = {
    "llama-3.1-8b": {"step_tokens": 1024, "ageing_s": 2, "prompt_weight": 1, "finish_tokens": 1152},
    "qwen3-0.6b": {"step_tokens": 1536, "ageing_s": 0.5, "prompt_weight": 1},
    "qwen3-30b-a3b": {"step_tokens": 1024, "ageing_s": 2, "prompt_weight": 1},
}
"""Parameters of `sjf` for short waits."""
_TUNED_LEAD_MS = {"llama-3.1-8b": 2, "qwen3-0.6b": 3, "qwen3-30b-a3b": 2}
_TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "bos_token": "t0", "eos_token": "t1"}


class NotServing(RuntimeError):
    """Raised if a server died or did not become ready; the message has its last lines."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that is ready."""

    server: Server
    version: str
    start_s: float
    flags: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)


def flags_of(options: argparse.Namespace, system: str) -> dict[str, Any]:
    """Returns what is set on a system besides its model and addresses; {} means its defaults."""
    if system == TUNED:
        parameters = json.dumps(_TUNED_FLAGS[options.shape])
        lead_ms = _TUNED_LEAD_MS[options.shape]
        times = {"busy_poll_us": 3000, "plan_lead_ms": lead_ms, "flush_ms": 2}
        return {"policy": "sjf", "policy_parameters": parameters, **times}
    if system in PEERS:
        small = ["--max-num-batched-tokens=1024"] if system == VLLM_SMALL else []
        formats = quantization.peer_flags(options)
        if options.ranks > 1:
            formats.append(f"--tensor-parallel-size={options.ranks}")
        serve = [f"--max-model-len={CONTEXT_LENGTH}", "--no-enable-prefix-caching", *small, *formats]
        return {"serve": serve} | ({"environment": ["VLLM_BATCH_INVARIANT=1"]} if system == VLLM_SAME_BITS else {})
    return {}


def model_folder(shape: str, *, tokenizer: bool = False) -> Path:
    """Writes a folder of the shape without weights and returns it; with `tokenizer`, as a peer expects it."""
    folder = WORK / ("peer-models" if tokenizer else "models") / shape
    write_folder(shape, folder)
    if tokenizer:
        limit = ALL_SHAPES[shape]["max_position_embeddings"]
        (folder / "tokenizer_config.json").write_text(json.dumps({**_TOKENIZER, "model_max_length": limit}))
    return folder


@asynccontextmanager
async def roster(options: argparse.Namespace, system: str, log: Log, limit_s: float) -> AsyncIterator[Serving]:
    """Runs Roster's services. Raises NotServing."""
    flags, mode = flags_of(options, system), {"deterministic": True} if system == SAME_BITS else {}
    runner: dict[str, object] = {"device": "hash", "model": "hash"}
    if options.device == "cuda":
        runner = {"model": model_folder(options.shape), "weights": "random", **quantization.runner_flags(options)}
    if options.ranks > 1:
        runner |= {"tensor_parallel": options.ranks, "all_reduce": options.all_reduce}
    runner |= mode
    begin_s = time.monotonic()
    try:
        async with Stack(Endpoints.free(), scheduler=flags, runner=runner, on_line=log.line) as stack:
            model = await stack.wait_ready(limit_s)
            start_s = time.monotonic() - begin_s
            facts = await service_settings(stack.endpoints.admin_listen)
            server = Server("grpc", stack.endpoints.listen, model.name, model.vocab_size)
            yield Serving(server, str(facts["server_version"]), start_s, flags | mode, facts)
    except (ServiceDiedError, NotReadyError) as error:
        raise NotServing(str(error)) from None


@asynccontextmanager
async def vllm(
    options: argparse.Namespace, system: str, site: Path, log: Log, limit_s: float
) -> AsyncIterator[Serving]:
    """Runs vLLM's server of the site, with weights made in GPU memory. Raises NotServing."""
    folder = await asyncio.to_thread(model_folder, options.shape, tokenizer=True)
    flags = flags_of(options, system)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = [
        *await asyncio.to_thread(environment, site),
        *flags.get("environment", ()),
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)),
        *("--load-format=dummy", "--dtype=bfloat16", "--served-model-name=peer"),
        *("--host=127.0.0.1", f"--port={address.rpartition(':')[2]}", *flags["serve"]),
    ]
    begin_s = time.monotonic()
    child = await ChildProcess.start(system, command, log.line)
    try:
        await _wait_healthy(child, address, limit_s)
        vocab_size = ALL_SHAPES[options.shape]["vocab_size"]
        server = Server("openai", address, "peer", vocab_size)
        yield Serving(server, version(site), time.monotonic() - begin_s, flags)
    finally:
        try:
            await child.stop(STOP_S)
        finally:
            with suppress(ProcessLookupError, PermissionError):  # its engine is another process of its group
                os.killpg(child.pid, signal.SIGKILL)


async def _wait_healthy(child: ChildProcess, address: str, limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while time.monotonic() < end_s:
            if child.returncode is not None:
                await asyncio.sleep(0.2)  # the rest of its output
                raise NotServing(f"{child.name} ended with status {child.returncode}: {tail(child)}")
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.get(f"http://{address}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(POLL_S)
    raise NotServing(f"{child.name} was not ready after {limit_s:.0f} s: {tail(child)}")


def tail(child: ChildProcess, lines: Sequence[str] = ()) -> str:
    """Returns a process's last lines as one."""
    return " | ".join(line.strip() for line in list(lines or child.tail)[-TAIL_LINES:]) or "it printed nothing"
