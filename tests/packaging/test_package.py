"""The package as users import it: short names, and no conflicts with their own files."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from grpc_tools import protoc

import roster_client

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", roster_client.__all__)
def test_a_public_name_is_what_its_module_defines(name: str) -> None:
    found = getattr(roster_client, name)
    assert found.__name__ == name and found.__module__.startswith("roster_client.")


def test_the_public_modules_exist() -> None:
    """Services have imported these since the first release."""
    from roster_client.client import RosterClient
    from roster_client.requests import Message

    assert (RosterClient, Message) == (roster_client.RosterClient, roster_client.Message)


def test_all_names_are_imported_lazily() -> None:
    code = "import sys, roster_client; assert 'grpc' not in sys.modules; from roster_client import *; RosterClient"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Client'"):
        getattr(roster_client, "Client")  # noqa: B009


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_a_users_own_protos_do_not_conflict(tmp_path: Path, first: str) -> None:
    """A backend often has a folder `protos/` with an `inference.proto`, compiled from its root."""
    protos = tmp_path / "protos"
    protos.mkdir()
    (protos / "__init__.py").touch()
    (protos / "inference.proto").write_text('syntax = "proto3"; package mine; message Request { string text = 1; }')
    assert protoc.main(["protoc", f"-I{tmp_path}", f"--python_out={tmp_path}", "protos/inference.proto"]) == 0
    imports = {
        "ours": "from roster_protos import inference_pb2 as ours",
        "theirs": "from protos import inference_pb2 as theirs",
    }
    lines = [imports[first], *imports.values(), "theirs.Request(text='x'); ours.GenerateRequest(request_id='y')"]
    lines += ["import roster_client.client, roster_client.client.sync_client, roster_client.client.admin"]
    lines += ["import protos; assert protos.__path__[0].startswith(sys.path[0]), protos.__path__"]
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; " + "; ".join(lines)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_wheel_contains_only_own_packages() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert all(name.startswith(("roster_", "scheduler_svc", "runner_svc")) for name in wheel["packages"])
    assert not (ROOT / "protos" / "__init__.py").exists()
