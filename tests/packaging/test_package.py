"""The package as users import it: short names, and no conflicts with their own files."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from grpc_tools import protoc
from hatchling.builders.wheel import WheelBuilder
from typer.testing import CliRunner

import roster_client
from roster_client.cli import app
from roster_common import distribution
from roster_common.service_command import read_command_line
from roster_common.setting_sources import ServiceSettings
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.versions import versions
from scheduler_svc.operation.service import _version as scheduler_version
from scheduler_svc.settings.scheduler_settings import SchedulerSettings
from tests.support.thoroughness import FULL

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


def test_a_wheel_has_the_commit_and_absolute_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSTER_COMMIT", "1a2b3c4")
    monkeypatch.setenv("ROSTER_SOURCE_URL", "https://code.example/team/roster")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as files:
        assert files.read("roster_common/commit.txt") == b"1a2b3c4\n"
        (tmp_path / "commit.txt").write_bytes(files.read("roster_common/commit.txt"))
        (name,) = (name for name in files.namelist() if name.endswith("/METADATA"))
        metadata = files.read(name).decode()
    monkeypatch.setattr(distribution, "_COMMIT", tmp_path / "commit.txt")
    assert distribution.version_line("roster").endswith(" (commit 1a2b3c4)")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert f"](https://code.example/team/roster/raw/v{version}/docs/images/timeline.svg)" in metadata
    assert f"](https://code.example/team/roster/blob/v{version}/docs/policies.md#" in metadata
    assert re.findall(r"\]\((?!https://code\.example/)\S+\)", metadata) == []
    assert "Project-URL: Source, https://code.example/team/roster\n" in metadata


@pytest.mark.parametrize(
    ("remote", "page"),
    [
        ("git@code.example:team/roster.git", "https://code.example/team/roster"),
        ("ssh://git@code.example/team/roster", "https://code.example/team/roster"),
        ("https://name:secret@code.example/team/roster.git", "https://code.example/team/roster"),
        ("https://code.example/team/roster/", "https://code.example/team/roster"),
        ("/work/roster", ""),
        ("", ""),
    ],
)
def test_the_description_links_to_the_page_of_the_sources(remote: str, page: str) -> None:
    hooks = runpy.run_path(str(ROOT / "hatch_build.py"))
    assert hooks["source_url"](remote) == page
    rest = ", [us](https://x.example), [below](#b)\n```sh\nx[0](y)\n```\n"
    links = f"![A run]({page}/raw/v1/docs/images/top.svg), [docs]({page}/blob/v1/docs/models.md#b)"
    readme = "![A run](docs/images/top.svg), [docs](docs/models.md#b)"
    assert hooks["description"](readme + rest, page, "v1") == (links if page else "A run, docs") + rest


def printed(settings: type[ServiceSettings], name: str, version: Callable[[], str]) -> list[str]:
    """Returns the lines of a service's `--version`."""
    with pytest.raises(SystemExit, match="0"), contextlib.redirect_stdout(io.StringIO()) as out:
        read_command_line(settings, name, "", version, ["--version"])
    return out.getvalue().splitlines()


def test_the_commands_print_their_version(monkeypatch: pytest.MonkeyPatch) -> None:
    version = distribution.distribution_version()
    assert CliRunner().invoke(app, ["--version"]).stdout == f"roster {version}\n"
    assert printed(SchedulerSettings, "roster-scheduler", scheduler_version) == [f"roster-scheduler {version}"]
    if FULL or "torch" in sys.modules:
        lines = printed(RunnerSettings, "roster-runner", versions)
        assert [line.split()[0].rstrip(":") for line in lines[:4]] == ["roster-runner", "torch", "CUDA", "GPU"]
    monkeypatch.setitem(sys.modules, "torch", None)
    first, second = printed(RunnerSettings, "roster-runner", versions)
    assert first == f"roster-runner {version}" and second.startswith("torch: none (import of torch halted")
