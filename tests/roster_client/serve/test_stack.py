"""How long services may take until they are ready."""

from __future__ import annotations

import time
from typing import Any, Self

import grpc
import pytest

from roster_client.client.errors import UnavailableError
from roster_client.serve import stack as stack_module
from roster_client.serve.stack import Endpoints, NotReadyError, Stack


class NeverReady:
    """A client of a service that loads its model; `calls` counts its questions."""

    calls = 0
    on_call: Any = None

    def __init__(self, *_: object, **__: object) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def get_model(self, **_: object) -> None:
        type(self).calls += 1
        self.on_call(type(self).calls)
        raise UnavailableError(grpc.StatusCode.UNAVAILABLE, "no runner")


async def test_progress_of_the_runner_extends_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    stack = Stack(Endpoints(), on_line=lambda name, line: lines.append(line))
    told = ["downloading acme/tiny (9.0 GB)  percent=1", "downloading acme/tiny (9.0 GB)  percent=2", "a warning"]

    def tell(call: int) -> None:
        if call % 5 == 0 and told:
            stack._line("runner", told.pop(0))

    monkeypatch.setattr(NeverReady, "on_call", staticmethod(tell))
    monkeypatch.setattr(stack_module, "RosterClient", NeverReady)
    monkeypatch.setattr(stack_module, "_POLL_S", 0.05)
    began_at = time.monotonic()
    with pytest.raises(NotReadyError, match=r"within 0\.5 s"):
        await stack.wait_ready(0.5)
    assert time.monotonic() - began_at > 0.7
    assert lines[:2] == [line for line in lines if "percent" in line]
