"""A scheduler and several runners as child processes of a benchmark."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping

from roster_client.client import RosterClient
from roster_client.client.admin import AdminClient
from roster_client.client.errors import UnavailableError
from roster_client.serve.child_process import ChildProcess
from roster_client.serve.stack import Endpoints
from roster_common.setting_options import as_arguments
from roster_protos import inference_pb2 as pb
from runner_svc.group.member import own_gpu_first

READY_S = 150.0


class Fleet:
    """A scheduler and runners "a", "b", ... as child processes."""

    def __init__(
        self,
        settings: Mapping[str, object],
        *,
        gpus: int = 1,
        roles: Mapping[str, str] | None = None,
        log_level: str = "info",
    ) -> None:
        """`settings`: of all runners. `gpus`: among how many they are divided, by name. `roles`: by name, of those
        with another role than `both`. `log_level`: of the scheduler."""
        self.endpoints = Endpoints.free()
        self._settings = settings
        self._gpus, self._roles, self._log_level = gpus, roles or {}, log_level
        self._children: dict[str, ChildProcess] = {}
        self.lines: list[str] = []

    async def start(self, name: str) -> None:
        """Starts the scheduler, or a runner of this name."""
        ends = self.endpoints
        if name == "scheduler":
            flags = [f"--listen={ends.listen}", f"--link={ends.link}", f"--admin-listen={ends.admin_listen}"]
            command = [
                sys.executable,
                "-m",
                "scheduler_svc.main",
                *flags,
                "--metrics-listen=",
                "--flush-ms=1",
                f"--log-level={self._log_level}",
            ]
        else:
            role = {"role": self._roles[name]} if name in self._roles else {}
            flags = as_arguments({"link": ends.link, "runner_id": name, **self._settings, **role})
            seen = [] if self._gpus == 1 else ["env", f"CUDA_VISIBLE_DEVICES={self._visible(name)}"]
            command = [*seen, sys.executable, "-m", "runner_svc.main", *flags]
        self._children[name] = await ChildProcess.start(name, command, self._line)

    def _visible(self, name: str) -> str:
        return own_gpu_first(ord(name) - ord("a"), self._gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))

    async def ready(self, client: RosterClient, admin: AdminClient, count: int) -> pb.GetModelResponse:
        """Waits until `count` runners serve, and returns their model. Raises RuntimeError."""
        deadline = time.monotonic() + READY_S
        while True:
            try:
                if len((await admin.get_status(deadline_s=2)).runners) >= count:
                    return await client.get_model(deadline_s=2)
            except UnavailableError:
                pass
            ended = [child for child in self._children.values() if child.returncode is not None]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"not ready: {[' | '.join(child.tail) for child in ended] or self.lines[-20:]}")
            await asyncio.sleep(0.05)

    async def end(self, name: str) -> float:
        """Sends SIGTERM and waits for the end; returns the seconds that it took."""
        began_at = time.monotonic()
        await self._children.pop(name).stop(60.0)
        return time.monotonic() - began_at

    async def stop(self) -> None:
        """Ends all."""
        for name in list(self._children):
            await self.end(name)

    def _line(self, name: str, line: str) -> None:
        self.lines.append(f"{name}: {line}")
