"""The command as an operator runs it: its exit status, its refusals, and its help."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from roster_common.setting_sources import UnusableSettings
from roster_protos import plan_pb2
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.backend_factory import _gpu_options, build_backend
from tests.support.fake_scheduler import FakeScheduler
from tests.support.host_backend import no_progress
from tests.support.in_this_process import Ended, run_runner
from tests.support.plans import SAMPLE, admission, plan

COMMAND = [sys.executable, "-m", "runner_svc.main"]
ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROSTER_")}
    return inherited | {"PYTHONPATH": str(ROOT)}


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *flags], capture_output=True, text=True, timeout=60, env=environment(), check=False
    )


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_plan_and_ends_with_0(tmp_path: Path, ending: signal.Signals) -> None:
    scheduler = FakeScheduler(f"ipc://{tmp_path}/link")
    flags = [
        "--device",
        "hash",
        "--link",
        scheduler.endpoint,
        "--test-backend",
        '{"step_ms": 600}',
        "--log-format",
        "json",
    ]
    process = subprocess.Popen([*COMMAND, *flags], stderr=subprocess.PIPE, text=True, env=environment())
    try:
        assert scheduler.welcome().device == "hash"
        scheduler.send(number=1, plan=plan(admissions=[admission(0, [1], [1])], extents=[(0, 0, 1, SAMPLE)]))
        scheduler.send(number=1, ping=plan_pb2.Ping())
        scheduler.expect("pong")
        process.send_signal(ending)
        assert scheduler.expect("event").event.draining
        assert scheduler.expect("result").number == 1
        _, stderr = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
        scheduler.close()
    assert process.returncode == 0
    events = [json.loads(line) for line in stderr.splitlines()]
    assert [event["event"] for event in events] == ["ready", "session begins", "stopped"]
    assert events[0]["slots"] == 8


def test_a_host_pool_is_made_before_hello_and_works_over_the_link(tmp_path: Path) -> None:
    scheduler = FakeScheduler(f"ipc://{tmp_path}/link")
    flags = ["--device", "hash", "--link", scheduler.endpoint, "--host-kv-tokens", "64", "--log-format", "json"]
    trouble = ["--test-backend", '{"copy_delay_ms": 30, "copy_seed": 4}']
    process = subprocess.Popen([*COMMAND, *flags, *trouble], stderr=subprocess.PIPE, text=True, env=environment())
    try:
        hello = scheduler.welcome()
        assert (hello.num_host_blocks, hello.block_bytes) == (4, 128)
        tag = b"n" * 20
        scheduler.send(number=1, plan=plan(admissions=[admission(0, [1], [1])], extents=[(0, 0, 1, SAMPLE)]))
        scheduler.send(number=2, plan=plan(offloads=[[(1, 4, tag), (2, 2, tag)]]))
        results = [scheduler.expect("result").result for _ in range(2)]
        assert results[1].offloads_done == b"\1\0\0\0"  # held until then
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
        scheduler.close()
    assert process.returncode == 0
    events = [json.loads(line) for line in stderr.splitlines()]
    assert [event["event"] for event in events][:2] == ["made the host pool", "ready"]
    assert events[0]["blocks"] == 4


def test_a_rejected_runner_ends_with_1_and_the_reason(tmp_path: Path) -> None:
    scheduler = FakeScheduler(f"ipc://{tmp_path}/link")
    process = subprocess.Popen(
        [*COMMAND, "--device", "null", "--link", scheduler.endpoint],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        scheduler.expect("hello")
        scheduler.send(rejection=plan_pb2.Rejection(reason="block sizes differ"))
        _, stderr = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
        scheduler.close()
    assert process.returncode == 1
    assert "block sizes differ" in stderr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--device", "tpu"], "roster-runner: setting device: Input should be"),
        (["--runner-key", "a.key"], "roster-runner: encrypting the link needs both runner_key and scheduler_key: set"),
        (["--device", "hash", "--slots", "0"], "slots: Input should be greater than or equal to 1"),
        (["--device", "hash", "--kv-tokens", "8"], "kv_tokens is 8, less than one block: set it to"),
        (["--device", "hash", "--host-kv-tokens", "8"], "host_kv_tokens is 8, less than one block: set it to at"),
        (["--device", "hash", "--slots", "600"], "max_step_tokens is 512: set it to at least the number of"),
        (["--device", "cpu", "--model", "/no/such/model"], "There is no model '/no/such/model'"),
        (["--device", "cpu", "--weights", "random"], "weights is 'random', which requires a GPU"),
        (["--device", "cpu", "--kv-cache-dtype", "fp8_e4m3"], "kv_cache_dtype is 'fp8_e4m3', which requires a GPU"),
        (["--device", "hash", "--kv-cache-dtype", "fp8_e4m3"], "set kv_cache_dtype to 'auto'"),
        (["--device", "hash", "--quantization", "int4"], "has no weights: set quantization to 'none'"),
        (
            ["--device", "null", "--draft", "ngram"],
            "draft is 'ngram', but the test backend 'null' verifies nothing: set",
        ),
        (["--draft", "model:"], "setting draft: 'model:' names no draft model: write 'model:' and its folder"),
        (
            ["--device", "cpu", "--draft", "model:/tiny"],
            "draft is 'model:/tiny': There is no model '/tiny'; use a fold",
        ),
        (
            ["--device", "hash", "--draft", "model:/tiny"],
            "the device 'hash' has one draft model: set draft to 'model:h",
        ),
        (["--draft", "eagle"], "'eagle' names no draft layer: write 'eagle:' and the folder of EAGLE's draft layer"),
        (["--draft", "medusa:"], "'medusa:' names no heads: write 'medusa:' and the folder of Medusa heads"),
        (["--device", "hash", "--draft", "medusa:/x"], "the test backend 'hash' has no hidden states: set draft to"),
        (["--draft", "n-gram"], "there is no drafter 'n-gram': set it to 'ngram', or to '' for no drafts"),
        (["--max-drafts", "16"], "max_drafts: Input should be less than or equal to 15"),
        (["--model", "/nope", "--link", "127.0.0.1:5"], "setting link: '127.0.0.1:5' is not an endpoint; write tcp://"),
    ],
)
def test_unusable_settings_are_reported_in_one_sentence(flags: list[str], sentence: str) -> None:
    assert_refused(run_runner(*flags), sentence)


def test_a_gpu_needs_the_draft_model_that_is_named() -> None:
    with pytest.raises(UnusableSettings, match="draft is 'model:/tiny': There is no model '/tiny'"):
        build_backend(RunnerSettings.read(draft="model:/tiny"), "cuda", no_progress)


def test_a_gpu_verifies_at_most_seven_drafts_of_a_sequence() -> None:
    with pytest.raises(UnusableSettings, match="a GPU verifies at most 7 tokens of a sequence in a step"):
        build_backend(RunnerSettings.read(draft="ngram", max_drafts=8), "cuda", no_progress)


def test_timings_of_a_gpu_that_drafts_are_kept_apart() -> None:
    settings = [RunnerSettings.read(**given) for given in ({}, {"draft": "ngram"}, {"draft": "ngram", "max_drafts": 3})]
    keys = [(options.draft, options.max_drafts) for options in (_gpu_options(each) for each in settings)]
    assert keys == [("", 0), ("ngram", 7), ("ngram", 3)]


def test_the_process_reports_it_and_exits() -> None:
    assert_refused(run("--device", "hash", "--link", "tcp://*:5"), "link is 'tcp://*:5', which is not a usable ZeroMQ")


def assert_refused(finished: subprocess.CompletedProcess[str] | Ended, sentence: str) -> None:
    assert finished.returncode == 2
    assert sentence in finished.stderr
    assert "Traceback" not in finished.stderr
    assert len(finished.stderr.strip().splitlines()) == 1


def test_help_documents_every_setting() -> None:
    finished = run("--help")
    assert finished.returncode == 0
    for flag in ("--link", "--model", "--device", "--slots", "--kv-tokens", "--max-step-tokens"):
        assert flag in finished.stdout


def test_the_test_backends_start_without_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from runner_svc import service\n"
        "from runner_svc.startup.backend_factory import build_backend\n"
        "from runner_svc.settings.runner_settings import RunnerSettings\n"
        "for device in ('hash', 'null'):\n"
        "    print(build_backend(RunnerSettings(), device, print).device)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment(), check=False
    )
    assert (finished.stdout.split(), finished.returncode) == (["hash", "null"], 0), finished.stderr
