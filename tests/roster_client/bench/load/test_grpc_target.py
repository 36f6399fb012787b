"""Messages of a load on Roster's gRPC API."""

from __future__ import annotations

import pytest

from roster_client.bench.load.grpc_target import GrpcTarget
from roster_client.bench.load.workload import LoadRequest


@pytest.mark.parametrize("speculate", [None, False])
def test_a_load_may_forbid_drafts(speculate: bool | None) -> None:
    target = GrpcTarget("127.0.0.1:1", speculate=speculate)
    _, message = target.prepare(LoadRequest("r", 0.0, "prompt", 1, 5))
    assert message.HasField("speculate") == (speculate is False) and not message.speculate
