"""The services where the environment is not what a developer has: IPv6 alone, a proxy, a full disk, no home folder."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from roster_client.client.sync_client import SyncRosterClient
from roster_client.serve.free_ports import free_ports
from tests.support.fake_hub import fake_hub
from tests.support.in_this_process import run_scheduler
from tests.support.metrics_scrape import scrape
from tests.support.other_user import as_other_user, other_users_environment
from tests.support.processes import RosterProcesses
from tests.support.thoroughness import FULL, choice
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy")


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@contextmanager
def ipv6_roster(folder: Path) -> Iterator[RosterProcesses]:
    """All addresses are [::1]."""
    listen, admin, link, metrics = (f"[::1]:{port}" for port in free_ports(4))
    scheduler = {"listen": listen, "admin_listen": admin, "link": f"tcp://{link}", "metrics_listen": metrics}
    roster = RosterProcesses(folder, scheduler=scheduler, runner={"device": "hash", "link": f"tcp://{link}"})
    roster.address, roster.metrics_address = listen, metrics
    with roster:
        yield roster


@pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6 here")
def test_ipv6_with_a_proxy_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ipv6_roster(tmp_path) as roster:
        with SyncRosterClient(roster.address) as client:
            assert len(client.generate([1, 2], max_tokens=4, ignore_eos=True).completion().choices[0].token_ids) == 4
        for name in PROXIES:
            monkeypatch.delenv(name)
        assert scrape(roster.metrics_address)
        assert roster.stop() == {"scheduler": 0, "runner": 0}


def test_services_whose_log_is_on_a_full_disk_go_on(tmp_path: Path) -> None:
    for name in ("scheduler", "runner"):
        (tmp_path / f"{name}.log").symlink_to("/dev/full")
    with RosterProcesses(tmp_path, runner={"device": "hash"}) as roster:
        with SyncRosterClient(roster.address) as client:
            assert len(client.generate([1, 2], max_tokens=4, ignore_eos=True).completion().choices[0].token_ids) == 4
        assert roster.stop() == {"scheduler": 0, "runner": 0}


@pytest.mark.parametrize(
    "redirections", choice(["2>&-", ">&- 2>&- <&-", ">/dev/full 2>/dev/full"], in_ci=[">&- 2>&- <&-"])
)
def test_a_runner_without_standard_streams_ends_with_its_status(redirections: str) -> None:
    command = f"exec {sys.executable} -m runner_svc.main --device=hash --kv-tokens=1 {redirections}"
    ended = subprocess.run(["sh", "-c", command], cwd=ROOT, timeout=60, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "")


_NAMES = """
import sys
from pathlib import Path
from runner_svc.catalog.source import model_folder
from runner_svc.settings.runner_settings import default_cache_folder

for name in sys.argv[1:]:
    try:
        print(model_folder(name, default_cache_folder(), lambda what, share: None))
    except ValueError as error:
        print(type(error).__name__, error)
"""


def test_a_user_without_home_and_name(tmp_path: Path) -> None:
    """A container's uid: no passwd entry, no HOME. What needs a cache says so; a folder is served from where it is."""
    environment = other_users_environment()
    folder = make_tiny_model("llama", tmp_path / "tiny")
    gguf_file = write_tiny_gguf(tmp_path / "tiny.gguf")
    names = [str(folder), str(gguf_file), "acme/tiny", "~/tiny", "~nobody-here/tiny"]
    ended = subprocess.run(
        as_other_user([sys.executable, "-c", _NAMES, *names]),
        env=environment | {"HF_HUB_OFFLINE": "1"},
        cwd="/",
        timeout=120,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    served, converted, cached, *expanded = ended.stdout.splitlines()
    assert served == str(folder)
    assert "/nonexistent/.cache/roster" in converted and "set cache_dir to a folder" in converted
    assert "has no home folder: set HF_HOME to a folder that can be written" in cached
    assert all("'~' names no folder" in line or "There is no model" in line for line in expanded)


@pytest.mark.parametrize("environment", choice([{}, {"HOME": "/"}, {"HOME": "/proc/1"}], in_ci=[{}]))
def test_a_runner_of_such_a_user(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "runner_svc.main", "--device=hash", "--link=tcp://127.0.0.1:1"]
    process = subprocess.Popen(
        as_other_user(command),
        env=other_users_environment() | environment,
        cwd="/",
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        lines = [process.stderr.readline(), process.stderr.readline()]
        process.send_signal(signal.SIGTERM)
        lines.append(process.stderr.read())
        assert process.wait(20) == 0, lines
    finally:
        process.kill()
        process.wait()
    assert "runner names can't be locked: set --runner-id" in lines[0] and "ready" in lines[1], lines


def test_a_scheduler_without_a_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def unusable() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp', '/']")

    monkeypatch.setattr("tempfile.gettempdir", unusable)
    ended = run_scheduler("--listen=127.0.0.1:0", "--admin-listen=", "--metrics-listen=", "--link=tcp://127.0.0.1:*")
    assert ended.returncode == 2 and "set TMPDIR to a writable one" in ended.stderr, ended


def test_a_folder_for_temporary_files_with_a_path_too_long_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    ended = run_scheduler("--listen=127.0.0.1:0", "--admin-listen=", "--metrics-listen=", "--link=tcp://127.0.0.1:*")
    assert ended.returncode == 2 and "too long for the path of a socket" in ended.stderr, ended
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(not FULL, reason="imports torch; test_download has the same within a process")
def test_a_signal_ends_a_runner_that_downloads(tmp_path: Path) -> None:
    with fake_hub() as hub:
        hub.repositories["acme/tiny"] = {
            "config.json": b'{"model_type": "llama"}',
            "model.safetensors": b"0" * 1_000_000,
        }
        hub.gate = threading.Event()
        process = subprocess.Popen(
            [sys.executable, "-m", "runner_svc.main", "--device=cpu", "--model=acme/tiny", "--link=tcp://127.0.0.1:1"],
            env=os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stderr is not None
            lines = list(itertools.takewhile(lambda line: "downloading acme/tiny (1.0 MB)" not in line, process.stderr))
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0, lines
        finally:
            hub.gate.set()
            process.kill()
            process.wait()
