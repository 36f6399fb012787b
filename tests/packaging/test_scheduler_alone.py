"""`roster-scheduler` starts, answers health checks and refuses requests in an environment without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from roster_client.serve.free_ports import free_ports
from roster_protos import inference_pb2 as pb
from roster_protos import inference_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = ("torch", "transformers", "cupy", "accelerate", "safetensors", "gguf", "runner_svc")
# Python runs sitecustomize in every process, so that front workers are checked too.
SITECUSTOMIZE = """
import sys

BLOCKED = {blocked!r}
ATTEMPTS = {attempts!r}

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            with open(ATTEMPTS, "a") as log:
                log.write(name + "\\n")
            raise ModuleNotFoundError(f"No module named {{name!r}}")

sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture
def attempts(tmp_path: Path) -> Path:
    """Returns the file of attempts to import a blocked module, written by the sitecustomize in its folder."""
    path = tmp_path / "attempts"
    path.touch()
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE.format(blocked=BLOCKED, attempts=str(path)))
    return path


def environment(attempts: Path) -> dict[str, str]:
    """Returns this process's environment, with the modules blocked and without Roster's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ROSTER_")}
    return kept | {"PYTHONPATH": os.pathsep.join([str(attempts.parent), str(ROOT)])}


@contextmanager
def scheduler(attempts: Path, front_workers: int) -> Iterator[str]:
    """Runs a scheduler without a runner; yields its gRPC address."""
    api, admin, link = (f"127.0.0.1:{port}" for port in free_ports(3))
    command = [sys.executable, "-m", "scheduler_svc.main", "--listen", api, "--admin-listen", admin]
    command += ["--link", f"tcp://{link}", "--front-workers", str(front_workers), "--metrics-listen="]
    process = subprocess.Popen(command, env=environment(attempts), cwd=attempts.parent)
    try:
        yield api
        assert process.poll() is None
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def health(channel: grpc.Channel, service: str) -> int:
    """Returns a service's status; retries until the server answers."""
    request = health_pb2.HealthCheckRequest(service=service)
    deadline = time.monotonic() + 30
    while True:
        try:
            return health_pb2_grpc.HealthStub(channel).Check(request, timeout=2).status
        except grpc.RpcError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@pytest.mark.parametrize("front_workers", [0, 1])
def test_starts_without_torch(attempts: Path, front_workers: int) -> None:
    with scheduler(attempts, front_workers) as address, grpc.insecure_channel(address) as channel:
        assert health(channel, "") == health_pb2.HealthCheckResponse.SERVING
        assert health(channel, "roster.v1.InferenceService") == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as refused:
            inference_pb2_grpc.InferenceServiceStub(channel).GetModel(pb.GetModelRequest(), timeout=5)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert attempts.read_text() == ""


def test_the_block_works(attempts: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import transformers"], env=environment(attempts), capture_output=True, text=True
    )
    assert "No module named 'transformers'" in found.stderr
    assert attempts.read_text() == "transformers\n"
