"""The OpenAI gateway as a process beside both services: `smg`, which the extra `openai` installs."""

from __future__ import annotations

import asyncio
import errno
import json
import shlex
import shutil
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from roster_client.serve.free_ports import free_ports
from roster_client.serve.stack import Endpoints, NotReadyError, Stack
from roster_common.endpoints import check_free, is_loopback_host, join_address, split_address
from roster_common.extras import MODULES, missing
from roster_protos import inference_pb2 as pb

GATEWAY = "gateway"
LISTEN = "127.0.0.1:30000"
READY_S = 60.0
TOKENIZER_S = 10.0
"""Seconds to wait for the gateway's tokenizer after it lists the model; some test models have none."""
ANSWER_S = 3.0
_POLL_S = 0.2
_DRAIN_S = 5
_GRACE_S = 8.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that is to run in front of the services of one `Stack`."""

    program: str
    listen: str
    worker: str
    """Address of the scheduler's service for gateways, host:port."""
    flags: Mapping[str, object]
    """Settings of the scheduler that the gateway needs, by name."""

    @classmethod
    def beside(cls, endpoints: Endpoints, scheduler: Mapping[str, Any], listen: str | None) -> Self:
        """Returns the gateway for services at these addresses, with these settings of the scheduler.

        `listen`: its address, host:port; None: any free loopback port. Raises ValueError, before anything has started,
        if `smg` is not installed, or the address is taken or open to the network.
        """
        from scheduler_svc.settings.scheduler_settings import SchedulerSettings

        settings = SchedulerSettings.read(**scheduler)
        program = _program()
        if listen is None:
            listen = f"127.0.0.1:{free_ports(1)[0]}"
        else:
            _check_address(listen, settings.insecure)
        if settings.gateway_listen:
            return cls(program, listen, _dialled(settings.gateway_listen), {})
        if settings.tls_cert is None and settings.tokens is None:
            return cls(program, listen, _dialled(endpoints.listen), {})
        apart = f"127.0.0.1:{free_ports(1)[0]}"  # the gateway sends neither token nor TLS
        return cls(program, listen, apart, {"gateway_listen": apart})

    @property
    def url(self) -> str:
        """Base URL of the OpenAI API."""
        return f"http://{_dialled(join_address(*split_address(self.listen, LISTEN)))}/v1"

    async def start(self, stack: Stack) -> None:
        """Starts it as a process of the stack, and waits until `/v1/models` lists the model and requests are answered.

        Raises NotReadyError, and ServiceDiedError if it or a service ends before.
        """
        await stack.start_beside(GATEWAY, self._command(), _GRACE_S)
        deadline = time.monotonic() + READY_S
        while not await asyncio.to_thread(self._model):
            stack.check_alive()
            if time.monotonic() > deadline:
                raise NotReadyError(f"the gateway did not list the model within {READY_S:g} s")
            await asyncio.sleep(_POLL_S)
        deadline = time.monotonic() + TOKENIZER_S
        while not await asyncio.to_thread(self._has_tokenizer) and time.monotonic() < deadline:
            stack.check_alive()
            await asyncio.sleep(_POLL_S)

    def curl_line(self, model: pb.GetModelResponse) -> str:
        """Returns a shell command that asks the model something."""
        name = self._model() or model.name
        body: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": "Hello!"}]}
        path = "chat/completions"
        if not model.chat_template:
            body = {"model": name, "prompt": "Once upon a time", "max_tokens": 32}
            path = "completions"
        return (
            f"curl {self.url}/{path} -H 'Content-Type: application/json' "
            f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
        )

    def _command(self) -> list[str]:
        host, port = split_address(self.listen, LISTEN)
        return [
            self.program, "launch", "--host", host, "--port", str(port),
            "--worker-urls", f"grpc://{self.worker}",
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_ports(1)[0]),
            "--policy", "round_robin", "--health-check-interval-secs", "5", "--worker-startup-check-interval", "1",
            "--shutdown-grace-period-secs", str(_DRAIN_S), "--log-level", "error",
        ]  # fmt: skip

    def _model(self) -> str:
        """Returns the name of the model that is listed; "" if there is none yet."""
        listed = self._ask("models")
        return str(listed["data"][0]["id"]) if listed and listed.get("data") else ""

    def _has_tokenizer(self) -> bool:
        return self._ask("tokenize", {"model": self._model(), "prompt": "a"}) is not None

    def _ask(self, path: str, body: object = None) -> Any:
        """Returns the answer to a request, GET without a body; None if it failed."""
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=ANSWER_S) as answer:
                return json.load(answer)
        except (OSError, ValueError):
            return None


def is_banner(line: str) -> bool:
    """Returns whether it is a line of the picture that the gateway prints at its start, in Braille characters."""
    return "\u2800" <= line[:1] <= "\u28ff"


def is_early_failure(line: str) -> bool:
    """Returns whether it reports a request that failed, as `start` causes while it waits for the gateway."""
    return "request failed with server error" in line


def gateway_program() -> str | None:
    """Returns the path of `smg`, beside this Python or in PATH; None if it is not installed."""
    beside = Path(sys.executable).with_name("smg")
    return str(beside) if beside.exists() else shutil.which("smg")


def _program() -> str:
    """Returns the path of `smg`. Raises ValueError if it or its stubs are not installed."""
    program = gateway_program()
    if program is None or missing(MODULES["openai"]):
        raise ValueError("--openai needs the gateway smg: run pip install 'roster-serve[openai]'")
    return program


def _check_address(listen: str, insecure: bool) -> None:
    """Raises ValueError for an address that is not one, is open to the network, or taken."""
    host, port = split_address(listen, LISTEN)
    if not is_loopback_host(host) and not insecure:
        raise ValueError(
            f"openai_listen is {listen}, which is open to the network without authentication: listen on 127.0.0.1, set "
            "insecure if the network is private, or run smg with --api-key (docs/openai.md)"
        )
    try:
        check_free(host, port)
    except OSError as error:
        reason = "which another process uses" if error.errno == errno.EADDRINUSE else f"which failed: {error}"
        raise ValueError(
            f"openai_listen is {listen}, {reason}: stop that process, or give --openai-listen another address"
        ) from None


def _dialled(address: str) -> str:
    """Returns the address at which a client on this machine reaches a server that listens at `address`."""
    host, _, port = address.rpartition(":")
    return f"{_WILDCARDS.get(host.strip('[]'), host)}:{port}"
