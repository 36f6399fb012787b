"""Prompts and answers stay out of the logs, at the lowest level too, even when requests fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from roster_client.client.errors import RosterError
from roster_client.client.requests import Message
from roster_client.client.sync_client import SyncRosterClient
from tests.support.processes import RosterProcesses

MARKER = "Xyzzy-plugh-4711"
TOKENS = [17, 211, 94, 163, 58, 201, 7]
LEVEL = {"log_level": "debug"}

RAISE = """
import structlog, sys
from roster_common.logs import configure_logs
configure_logs("{form}", "debug")
def fail(prompt):
    raise ValueError("a sentence")
try:
    fail("{marker}")
except ValueError:
    structlog.get_logger().exception("a command failed", command="submit")
"""


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_traceback_shows_no_local_variable(form: str) -> None:
    source = RAISE.format(form=form, marker="PRO" + "MPT")
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=30, check=True)
    assert "a sentence" in ended.stderr and "PROMPT" not in ended.stderr.replace('fail("PROMPT")', "")


@pytest.mark.parametrize("workers", [0, 1])
def test_prompts_and_answers_are_not_logged(tmp_path: Path, workers: int) -> None:
    runner = {"device": "hash", "slots": 2, "kv_tokens": 512, **LEVEL}
    with RosterProcesses(tmp_path, scheduler={"front_workers": workers, **LEVEL}, runner=runner) as roster:
        with SyncRosterClient(roster.address, tenant="tenant") as client:
            client.generate(MARKER, raw=True, max_tokens=8, stop=[MARKER], deadline_s=20, logprobs=2).completion()
            client.generate(TOKENS, max_tokens=8, deadline_s=20).completion()
            client.generate([Message("user", MARKER), Message("assistant", MARKER)], max_tokens=4).completion()
            client.tokenize(MARKER)
            client.detokenize(client.tokenize(MARKER))
            for refused in (
                lambda: client.generate(MARKER * 2000, raw=True).completion(),
                lambda: client.generate(MARKER, raw=True, stop=[MARKER * 100]).completion(),
                lambda: client.generate(MARKER, raw=True, max_tokens=4, temperature=-1).completion(),
                lambda: client.generate([Message("", MARKER)]).completion(),
                lambda: client.generate([*TOKENS, 10**6]).completion(),
            ):
                with pytest.raises(RosterError):
                    refused()
            cut = client.generate(MARKER, raw=True, max_tokens=400, ignore_eos=True)
            next(iter(cut))
            cut.cancel()
            raw = client.channel.unary_stream("/roster.v1.InferenceService/Generate")
            with pytest.raises(Exception, match=r"INTERNAL|INVALID_ARGUMENT"):
                list(raw(b"\x0a\xff" + MARKER.encode(), timeout=10))
        roster.stop()
        text = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert "a runner joined" in text
    assert MARKER not in text and str(TOKENS)[1:-1] not in text
