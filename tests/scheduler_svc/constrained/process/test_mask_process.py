"""Real mask processes: killed during a compile, during a mask and in between; crashes of the library; limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID, NUM_TOKENS, byte_model
from scheduler_svc.constrained import mask_handle
from scheduler_svc.constrained.background import Background
from scheduler_svc.constrained.fork_server import ForkServer, Limits, MasksUnavailable
from scheduler_svc.constrained.mask_client import GRAMMAR_LIMITS, MASK_LIMITS, AwaitedRow, MaskClient
from scheduler_svc.constrained.mask_handle import MaskHandle
from scheduler_svc.constrained.source import UnusableGrammar
from tests.scheduler_svc.constrained.test_constraints import assert_whole, backend, submit
from tests.support.in_process import Stack
from tests.support.lockstep import advance
from tests.support.mask_handles import local_client

MODEL = byte_model("hash", "HashModel", NUM_TOKENS, 2048)
BYSTANDER = "([ab]{3}, ){3}"
TOLD = list(b"aab, bba, a")


class Processes:
    """A client with its two processes."""

    def __init__(self, grammars: Limits = GRAMMAR_LIMITS, masks: Limits = MASK_LIMITS) -> None:
        self.server = ForkServer(MODEL)
        self.handles = {
            "grammars": MaskHandle("grammars", self.server, 1, grammars),
            "masks": MaskHandle("masks", self.server, 2, masks),
        }
        self.client = MaskClient(NUM_TOKENS, self.handles["grammars"], self.handles["masks"], self.server)

    def pid(self, role: str) -> int:
        self.handles[role].start()
        pid = self.handles[role].pid
        assert pid is not None
        return pid

    def while_stopped(self, role: str, ask: Callable[[], object], then: signal.Signals) -> object:
        """Stops the process, calls `ask`, sends the signal once `ask` waits for an answer, and returns its result."""
        process, outcome = psutil.Process(self.pid(role)), []
        process.suspend()
        while process.status() != psutil.STATUS_STOPPED:  # otherwise it may answer before it stops
            time.sleep(0.001)
        thread = threading.Thread(target=lambda: outcome.append(ask()))
        thread.start()
        handle = self.handles[role]
        while not any(turn.locked() for turn in handle._turns):
            time.sleep(0.001)
        time.sleep(0.05)
        process.send_signal(then)
        thread.join()
        return outcome[0]


@contextmanager
def started(**limits: Limits) -> Iterator[Processes]:
    processes = Processes(**limits)
    processes.client.start()
    try:
        yield processes
    finally:
        processes.client.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with started() as processes:
        yield processes


def masks_of(client: MaskClient, disturb: Callable[[int], None] = lambda step: None) -> list[plan_pb2.Masks]:
    """Returns the masks of an unrelated sequence, token by token."""
    grammar, _ = client.check("regex", BYSTANDER, [])
    outputs = client.open(grammar, 2, 0, [IM_END_ID])
    masks = []
    for step in range(len(TOLD)):
        disturb(step)
        tokens = TOLD[step - 1 : step] if step else []
        made = client.make([AwaitedRow(row, output, tokens) for row, output in enumerate(outputs)])
        assert not made.failures
        masks.append(made.masks)
    return masks


def test_killed_between(processes: Processes) -> None:
    before = processes.client.deaths

    def kill(step: int) -> None:
        if step in (3, 7):
            for role in processes.handles:
                os.kill(processes.pid(role), signal.SIGKILL)

    assert masks_of(processes.client, kill) == masks_of(local_client(MODEL, 1))
    assert processes.client.check("regex", "a", [])[1] == 0
    deaths = {role: count - before[role] for role, count in processes.client.deaths.items()}
    assert deaths["masks"] == 2
    assert deaths["grammars"] in (1, 2), "a death of the other one may be seen only after the next kill"


def test_killed_at_a_mask(processes: Processes) -> None:
    client = processes.client
    grammar, _ = client.check("regex", BYSTANDER, [])
    outputs = client.open(grammar, 3, 0, [])
    rows = [AwaitedRow(row, output, TOLD[: row + 1]) for row, output in enumerate(outputs)]
    made = processes.while_stopped("masks", lambda: client.make(rows), signal.SIGKILL)
    twin = local_client(MODEL, 1)
    same = [AwaitedRow(row.row, *twin.open(grammar, 1, 0, []), row.tokens) for row in rows]
    assert made == twin.make(same)


def test_one_that_hangs_at_a_mask_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own timer can't end it while it is stopped. The next process makes the rows' masks."""
    monkeypatch.setattr(mask_handle, "GRACE_S", 0.1)
    with started(masks=Limits(MASK_LIMITS.spare_bytes, limit_s=2.0)) as processes:
        client, twin, stopped = processes.client, local_client(MODEL, 1), processes.pid("masks")
        grammar, _ = client.check("regex", BYSTANDER, [])
        outputs, twins = client.open(grammar, 2, 0, []), twin.open(grammar, 2, 0, [])
        for tokens in ([], TOLD[:2], TOLD[2:3]):
            if len(tokens) == 1:
                os.kill(stopped, signal.SIGSTOP)
            made, same = (
                each.make([AwaitedRow(row, output, tokens) for row, output in enumerate(those)])
                for each, those in ((client, outputs), (twin, twins))
            )
            assert made == same and not made.failures
        assert client.deaths == {"grammars": 0, "masks": 1} and processes.pid("masks") != stopped


def test_killed_at_a_compile(processes: Processes) -> None:
    """After one death the compile is repeated; the process for masks is not affected."""
    client, masks = processes.client, processes.pid("masks")
    checked = processes.while_stopped("grammars", lambda: client.check("regex", "[cd]{3}", [99]), signal.SIGKILL)
    assert isinstance(checked, tuple) and checked[1] == 1
    assert processes.pid("masks") == masks


@pytest.mark.parametrize(
    "schema",
    [
        '{"type": "integer", "const": -1e300}',
        '{"type": "integer", "minimum": -9223372036854775808, "maximum": -9223372036854775808}',
    ],
)
def test_what_ends_the_library_is_refused(processes: Processes, schema: str) -> None:
    """Here the schema's literals are not checked first."""
    client, pids = processes.client, {role: processes.pid(role) for role in processes.handles}
    deaths = client.deaths["grammars"]
    with pytest.raises(UnusableGrammar, match="crashes the grammar library"):
        client.check("json_schema", schema, [])
    assert client.deaths["grammars"] == deaths + 1
    assert processes.pid("masks") == pids["masks"]
    assert client.check("json_schema", '{"type": "integer", "const": 3}', list(b"3"))[1] == 1


def test_an_engine_outlives_what_ends_the_library() -> None:
    """If the front let it through, the engine refuses it with its field; an unrelated request gets its exact tokens."""
    stack = Stack()
    constraints = stack.engine.constraints
    constraints.work_in(Background(), Background(), MaskClient.of, time.monotonic)
    stack.add_runner(backend())
    stack.step()
    bystander = submit(stack, "regex", "[ab]{30}", max_tokens=30)
    deadly = [submit(stack, "json_schema", '{"type": "integer", "const": -1e300}') for _ in range(3)]
    deadline = time.monotonic() + 60
    while not stack.engine.requests.idle or stack.front.commands:
        advance(stack)
        time.sleep(0.002)
        assert time.monotonic() < deadline
    assert_whole([bystander])
    for request in deadly:
        refused = request.refused
        assert refused is not None and refused.field == "constraint.json_schema"
        assert refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert constraints.deaths == {"grammars": 3, "masks": 0}
    constraints.close()


@pytest.mark.parametrize(
    ("limits", "why", "deaths"),
    [
        (Limits(GRAMMAR_LIMITS.spare_bytes, limit_s=0.02), "takes too long", 1),
        (Limits(spare_bytes=4 << 20), "takes too much memory", 2),
    ],
    ids=["time", "memory"],
)
def test_the_kernel_bounds_what_a_grammar_takes(limits: Limits, why: str, deaths: int) -> None:
    """A grammar that takes too much memory gets one more attempt: earlier ones may have used it."""
    properties = {f"p{number}": {"type": "string", "pattern": "[a-z]{1,40}"} for number in range(900)}
    with started(grammars=limits) as small:
        with pytest.raises(UnusableGrammar, match=why):
            small.client.check("json_schema", json.dumps({"type": "object", "properties": properties}), [])
        assert small.client.deaths == {"grammars": deaths, "masks": 0}


def test_limits_are_set(processes: Processes) -> None:
    grammar, _ = processes.client.check("regex", "a", [])
    processes.client.open(grammar, 1, 0, [])  # the process answers only once they are set
    for role in processes.handles:
        process = psutil.Process(processes.pid(role))
        assert process.rlimit(psutil.RLIMIT_CORE) == process.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
        used, (most, hard) = process.memory_info().data, process.rlimit(psutil.RLIMIT_DATA)
        assert used < most == hard < 8 << 30


def test_many_tokens_and_rows_fit(processes: Processes) -> None:
    """Frames larger than a socket's buffer, and masks beyond the first mapping."""
    client = processes.client
    grammar, taken = client.check("regex", "[ab]*", [97] * 100_000)
    assert taken == 100_000
    outputs = client.open(grammar, 150, 0, [])
    for tokens in ([97, 98] * 300, [97]):
        made = client.make([AwaitedRow(row, output, tokens) for row, output in enumerate(outputs)])
        assert not made.failures and len(made.masks.rows) == 150
        assert len({row.bits for row in made.masks.rows}) == 1


def test_it_ends_with_the_process_that_started_it() -> None:
    with started() as processes:
        assert processes.server.process is not None
        pids = [processes.server.process.pid, *(processes.pid(role) for role in processes.handles)]
        children = [psutil.Process(pid) for pid in pids]
    psutil.wait_procs(children, 20)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(MasksUnavailable):
        processes.client.check("regex", "a", [])
    code = """
import os, signal
from runner_svc.backends.byte_tokenizer import NUM_TOKENS, byte_model
from scheduler_svc.constrained.mask_client import MaskClient
client = MaskClient.of(byte_model("hash", "HashModel", NUM_TOKENS, 2048), 1)
client.start()
print(client._grammars.pid, client._masks.pid, client._server.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    told = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    deadline = time.monotonic() + 30
    pids = [int(pid) for pid in told.stdout.split()]
    assert len(pids) == 3
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_serving_processes_never_import_the_library() -> None:
    modules = "scheduler_svc.operation.service, scheduler_svc.front.worker, scheduler_svc.front.gateway.service"
    code = f"import sys, {modules}, scheduler_svc.simulator.simulation; print('llguidance' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert told.stdout.split() == [b"False"]


def test_killed_while_it_starts() -> None:
    """Kills the fork server twice while it starts, and once more while mask processes live."""
    processes, killed = Processes(), list[int]()
    server = processes.server

    def kill() -> None:
        while len(killed) < 2:
            process = server.process
            if process is not None and process.pid not in killed:
                killed.append(process.pid)
                process.kill()
            time.sleep(0.001)

    def kill_again(step: int) -> None:
        if step == 4 and server.process is not None:
            server.process.kill()
        if step == 6:
            os.kill(processes.pid("masks"), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        assert masks_of(processes.client, kill_again) == masks_of(local_client(MODEL, 1))
    finally:
        thread.join()
        processes.client.close()
    assert processes.client.deaths == {"grammars": 0, "masks": 1}


def test_closed_while_it_starts() -> None:
    """Closing does not wait for the start to finish."""
    processes, ended = Processes(), []

    def start() -> None:
        try:
            processes.client.start()
        except MasksUnavailable as error:
            ended.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    while processes.server.process is None:
        time.sleep(0.001)
    processes.server.process.send_signal(signal.SIGSTOP)
    processes.client.close()
    thread.join(20)
    assert not thread.is_alive() and ended
    with pytest.raises(MasksUnavailable):
        processes.client.start()
