"""A client that hangs: keepalive pings detect it, and its streams are cancelled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from roster_client.client.sync_client import SyncRosterClient
from tests.e2e.conftest import WaitIdle
from tests.support.processes import roster_processes

STREAM = """
import sys
from roster_client.client.sync_client import SyncRosterClient
with SyncRosterClient(sys.argv[1]) as client:
    for event in client.generate("an endless stream", raw=True, max_tokens=8000, ignore_eos=True):
        print("event", flush=True)
"""


async def test_a_stopped_client_does_not_hold_its_slot(tmp_path: Path, wait_idle: WaitIdle) -> None:
    runner = {"device": "hash", "slots": 1, "kv_tokens": 16384, "test_backend": {"step_ms": 5, "eos_probability": 0}}
    with roster_processes(tmp_path, scheduler={"keepalive_s": 1}, runner=runner) as roster:
        command = [sys.executable, "-c", STREAM, roster.address]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.getcwd()})
        try:
            assert client.stdout is not None and client.stdout.readline() == b"event\n"
            client.send_signal(signal.SIGSTOP)
            # 8,000 tokens take at least 40 s; the only slot is free long before.
            status = await wait_idle(roster.admin_address)
            assert 0 < status.totals.sampled_tokens < 7000
            with SyncRosterClient(roster.address) as other:
                assert other.generate("a living one", raw=True, max_tokens=3, deadline_s=20).completion().choices
        finally:
            client.kill()
            client.wait()
