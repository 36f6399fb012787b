"""The runner's side of the link, against a scripted scheduler: sessions, duplicates, gaps, faults, heartbeats."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from roster_common.link_protocol import EARLY, OURS, TERMS
from roster_protos import plan_pb2
from runner_svc.execution.runner import Runner
from runner_svc.interface.ranks import RankLost
from runner_svc.link import greeting
from runner_svc.link.curve import CurveClient
from runner_svc.link.plan_socket import BrokenBackend, HungBackend, PlanSocket, Rejected
from runner_svc.tiers.thread_copier import ThreadCopier
from tests.support.fake_scheduler import FakeScheduler
from tests.support.plans import SAMPLE, admission, ints, plan
from tests.support.spy_backend import SpyBackend

BEGIN = plan(admissions=[admission(0, [1, 2, 3], [1, 2])], extents=[(0, 0, 3, SAMPLE)])


def decode(position: int) -> plan_pb2.Plan:
    return plan(extents=[(0, position, 1, SAMPLE)])


class GroupedRunner(Runner):
    """A runner whose group a test gives up."""

    why = ""

    @property
    def lost(self) -> str:
        return self.why


class RunnerUnderTest:
    """A runner whose link runs in a thread."""

    def __init__(self, endpoint: str, silence_s: float, plan_timeout_s: float = 60.0) -> None:
        self.backend = SpyBackend()
        self.runner = GroupedRunner(self.backend, "spy")
        self.link = PlanSocket(self.runner, endpoint, silence_s, plan_timeout_s=plan_timeout_s)
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def hold_steps(self) -> Callable[[], None]:
        """Makes steps wait until the returned function is called."""
        gate = threading.Event()
        self.backend.on_step = lambda batch: self._pass(gate)
        return gate.set

    def join(self) -> None:
        """Waits until the link has ended."""
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _pass(self, gate: threading.Event) -> None:
        assert gate.wait(20)

    def _run(self) -> None:
        try:
            self.link.run()
        except (Rejected, BrokenBackend, RankLost) as error:
            self.error = error


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[FakeScheduler]:
    scheduler = FakeScheduler(f"ipc://{tmp_path}/link")
    yield scheduler
    scheduler.close()


@pytest.fixture
def start(scheduler: FakeScheduler) -> Iterator[Callable[..., RunnerUnderTest]]:
    started: list[RunnerUnderTest] = []

    def start_one(silence_s: float = 30.0, plan_timeout_s: float = 60.0) -> RunnerUnderTest:
        started.append(RunnerUnderTest(scheduler.endpoint, silence_s, plan_timeout_s))
        return started[-1]

    yield start_one
    for runner in started:
        runner.link.stop()
        runner.join()


Start = Callable[..., RunnerUnderTest]


def test_hello_is_repeated_until_a_welcome(scheduler: FakeScheduler, start: Start) -> None:
    start()
    first, second = scheduler.expect("hello"), scheduler.expect("hello")
    assert first.session == 0
    assert first.hello == second.hello
    assert (first.hello.runner_id, first.hello.num_slots, first.hello.model.architecture) == ("spy", 4, "NullModel")
    scheduler.send(welcome=plan_pb2.Welcome())
    time.sleep(0.1)
    while scheduler.receive(0):  # sent before the Welcome arrived
        pass
    assert scheduler.receive(1.5) is None


def test_plans_are_executed_in_order_and_answered_with_their_numbers(scheduler: FakeScheduler, start: Start) -> None:
    start()
    scheduler.welcome()
    for number, body in enumerate([BEGIN, decode(3), decode(4)], 1):
        scheduler.send(number=number, plan=body)
    for number in (1, 2, 3):
        message = scheduler.expect("result")
        assert (message.session, message.number) == (1, number)
        assert ints(message.result.tokens) == [10]


@pytest.mark.parametrize("features", [[EARLY], []])
def test_a_result_tells_how_long_its_plan_was_queued(
    scheduler: FakeScheduler, start: Start, features: list[str]
) -> None:
    runner = start()
    scheduler.expect("hello")
    scheduler.send(welcome=plan_pb2.Welcome(features=features))
    release = runner.hold_steps()
    scheduler.send(number=1, plan=BEGIN)
    scheduler.send(number=2, plan=decode(3))
    deadline = time.monotonic() + 20
    while runner.link._next_plan < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    release()
    first, second = (scheduler.expect("result").result.timings for _ in range(2))
    assert not first.HasField("early_ns")
    assert second.HasField("early_ns") == bool(features)
    assert not features or 0.1e9 - second.idle_ns <= second.early_ns < 30e9


def test_messages_of_another_session_are_dropped(scheduler: FakeScheduler, start: Start) -> None:
    runner = start()
    scheduler.expect("hello")
    scheduler.send(session=0, number=1, plan=BEGIN)  # no session yet
    scheduler.welcome()
    scheduler.send(session=7, number=1, plan=BEGIN)
    scheduler.send(session=7, number=1, ping=plan_pb2.Ping())
    scheduler.send(session=7, rejection=plan_pb2.Rejection(reason="of an older life"))
    scheduler.nothing_but_hellos(0.5)
    assert runner.backend.batches == []
    scheduler.send(number=1, plan=BEGIN)
    scheduler.expect("result")


def test_frames_that_are_no_messages_are_ignored(scheduler: FakeScheduler, start: Start) -> None:
    start()
    scheduler.welcome()
    scheduler.send_frame(b"\xff\xff\xff")
    scheduler.send_frame(b"")
    scheduler.send(number=1, plan=BEGIN)
    scheduler.expect("result")


def test_a_repeated_plan_is_executed_once_and_answered_again(scheduler: FakeScheduler, start: Start) -> None:
    runner = start()
    scheduler.welcome()
    release = runner.hold_steps()
    scheduler.send(number=1, plan=BEGIN)
    scheduler.send(number=1, plan=BEGIN)  # while the plan computes there is no result to send
    scheduler.nothing_but_hellos(0.3)
    release()
    first = scheduler.expect("result")
    scheduler.nothing_but_hellos(0.3)
    scheduler.send(number=1, plan=BEGIN)
    assert scheduler.expect("result") == first
    assert len(runner.backend.batches) == 1
    scheduler.send(number=2, plan=decode(3))
    assert scheduler.expect("result").number == 2


def test_a_missing_plan_is_requested(scheduler: FakeScheduler, start: Start) -> None:
    runner = start()
    scheduler.welcome()
    scheduler.send(number=1, plan=BEGIN)
    scheduler.expect("result")
    scheduler.send(number=3, plan=decode(4))
    assert scheduler.expect("event").event.resend_from == 2
    assert len(runner.backend.batches) == 1
    scheduler.send(number=2, plan=decode(3))
    scheduler.send(number=3, plan=decode(4))
    assert [scheduler.expect("result").number for _ in range(2)] == [2, 3]


def test_a_fault_stops_everything_until_a_new_session(scheduler: FakeScheduler, start: Start) -> None:
    runner = start()
    scheduler.welcome()
    scheduler.send(number=1, plan=decode(0))  # the slot has no sequence
    assert "slot 0 has no sequence" in scheduler.expect("event").event.fault
    scheduler.send(number=2, plan=BEGIN)
    scheduler.send(number=1, plan=BEGIN)
    scheduler.nothing_but_hellos(0.5)
    assert runner.backend.batches == []
    assert scheduler.expect("hello").session == 1
    scheduler.session = 2
    scheduler.send(welcome=plan_pb2.Welcome())
    scheduler.send(number=1, plan=BEGIN)
    assert scheduler.expect("result").session == 2


def test_an_error_in_the_backend_is_a_fault_and_can_not_be_resumed(scheduler: FakeScheduler, start: Start) -> None:
    runner = start()

    def explode(batch: object) -> None:
        raise RuntimeError("out of memory")

    runner.backend.on_step = explode
    scheduler.welcome()
    scheduler.send(number=1, plan=BEGIN)
    assert "out of memory" in scheduler.expect("event").event.fault
    scheduler.session = 2
    scheduler.welcome(resume=True)
    assert "can't be kept after a fault" in scheduler.expect("event").event.fault


def test_a_ping_is_answered_while_a_plan_computes(scheduler: FakeScheduler, start: Start) -> None:
    runner = start()
    scheduler.welcome()
    release = runner.hold_steps()
    scheduler.send(number=1, plan=BEGIN)
    scheduler.send(number=41, ping=plan_pb2.Ping())
    assert scheduler.expect("pong").number == 41
    release()
    assert scheduler.expect("result").number == 1


def test_a_second_welcome_of_the_same_session_changes_nothing(scheduler: FakeScheduler, start: Start) -> None:
    start()
    scheduler.welcome()
    scheduler.send(number=1, plan=BEGIN)
    scheduler.expect("result")
    scheduler.send(welcome=plan_pb2.Welcome())
    scheduler.send(number=2, plan=decode(3))
    assert scheduler.expect("result").number == 2


def test_a_new_session_drops_the_queued_plans_of_the_old_one(scheduler: FakeScheduler, start: Start) -> None:
    runner = start()
    scheduler.welcome()
    release = runner.hold_steps()
    scheduler.send(number=1, plan=BEGIN)
    scheduler.send(number=2, plan=decode(3))
    deadline = time.monotonic() + 10
    while not runner.backend.batches and time.monotonic() < deadline:
        time.sleep(0.01)
    scheduler.session = 2
    scheduler.send(welcome=plan_pb2.Welcome())
    scheduler.send(number=9, ping=plan_pb2.Ping())
    scheduler.expect("pong")  # the socket is in the new session before the old plan ends
    release()
    scheduler.send(number=1, plan=plan(admissions=[admission(0, [5], [1])], extents=[(0, 0, 1, SAMPLE)]))
    message = scheduler.expect("result")
    assert (message.session, message.number) == (2, 1)
    assert [batch.tokens.tolist() for batch in runner.backend.batches] == [[1, 2, 3], [5]]


@pytest.mark.parametrize("resume", [True, False])
def test_a_restarted_scheduler_finds_the_runner_and_its_sequences(
    scheduler: FakeScheduler, start: Start, resume: bool
) -> None:
    start(silence_s=2.0)
    scheduler.welcome()
    scheduler.send(number=1, plan=BEGIN)
    scheduler.expect("result")
    scheduler.close()
    time.sleep(0.3)
    successor = FakeScheduler(scheduler.endpoint, session=2)
    try:
        hello = successor.expect("hello")
        assert (hello.session, hello.number) == (1, 1)
        successor.send(welcome=plan_pb2.Welcome(resume=resume))
        successor.send(snapshot_request=plan_pb2.SnapshotRequest())
        snapshot = successor.expect("snapshot").snapshot
        assert snapshot.last_plan == 0  # plan numbers restart in every session
        if resume:
            (sequence,) = snapshot.sequences
            assert (sequence.sequence_id, sequence.computed, ints(sequence.tokens)) == (100, 3, [1, 2, 3, 10])
            successor.send(number=1, plan=decode(3))
        else:
            assert not snapshot.sequences
            successor.send(number=1, plan=BEGIN)
        assert ints(successor.expect("result").result.tokens) == [10]
    finally:
        successor.close()


def test_after_silence_in_the_same_session_lost_messages_are_repeated(scheduler: FakeScheduler, start: Start) -> None:
    start(silence_s=0.5)
    scheduler.welcome()
    scheduler.send(number=1, plan=BEGIN)
    first = scheduler.expect("result")
    assert scheduler.expect("hello").session == 1
    scheduler.send(number=5, ping=plan_pb2.Ping())
    assert scheduler.expect("result") == first
    assert scheduler.expect("event").event.resend_from == 2
    assert scheduler.expect("pong").number == 5


def test_an_identity_that_gets_no_answer_is_replaced(
    scheduler: FakeScheduler, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting, "HELLO_INTERVAL_S", 0.05)
    monkeypatch.setattr(greeting, "_UNANSWERED_HELLOS", 3)
    start()
    identities = []
    for _ in range(9):
        scheduler.expect("hello")
        identities.append(scheduler.identity)
    assert len(set(identities)) >= 2
    scheduler.welcome()
    scheduler.send(number=1, plan=BEGIN)
    scheduler.expect("result")


def test_a_rejected_runner_ends_with_the_reason(scheduler: FakeScheduler, start: Start) -> None:
    runner = start()
    scheduler.expect("hello")
    scheduler.send(session=3, rejection=plan_pb2.Rejection(reason="another model is served here"))
    runner.join()
    assert str(runner.error) == "another model is served here"


def test_stop_finishes_the_plan_reports_and_ends(scheduler: FakeScheduler, start: Start) -> None:
    runner = start()
    scheduler.welcome()
    release = runner.hold_steps()
    scheduler.send(number=1, plan=BEGIN)
    scheduler.send(number=1, ping=plan_pb2.Ping())
    scheduler.expect("pong")
    runner.link.stop()
    assert scheduler.expect("event").event.draining
    release()
    assert scheduler.expect("result").number == 1
    runner.join()
    assert scheduler.receive(0.2) is None


def test_a_runner_without_a_scheduler_waits_and_can_be_stopped(tmp_path: Path) -> None:
    runner = RunnerUnderTest(f"ipc://{tmp_path}/nobody", 30.0)
    time.sleep(0.3)
    runner.link.stop()
    runner.join()
    assert runner.error is None


def test_an_earlier_term_and_a_session_that_was_left_are_fenced(scheduler: FakeScheduler, start: Start) -> None:
    """A scheduler that was paused learns of its successor from any message and can't take the runner back."""
    start()
    scheduler.expect("hello")
    scheduler.send(session=1, welcome=plan_pb2.Welcome(term=10))
    scheduler.send(session=2, welcome=plan_pb2.Welcome(term=20, resume=True))
    stale: list[dict[str, object]] = [
        {"session": 3, "welcome": plan_pb2.Welcome(term=10)},
        {"session": 1, "welcome": plan_pb2.Welcome(term=20)},
        {"session": 1, "number": 1, "plan": BEGIN},
        {"session": 1, "ping": plan_pb2.Ping()},
    ]
    for message in stale:
        scheduler.send(**message)  # type: ignore[arg-type]
        answer = scheduler.expect("event")
        assert answer.session == message["session"] and answer.event.fenced == 20
    scheduler.send(session=2, number=1, plan=BEGIN)
    assert scheduler.expect("result").session == 2


def test_a_ping_reveals_a_lost_plan_and_a_pong_a_lost_result(scheduler: FakeScheduler, start: Start) -> None:
    start()
    scheduler.welcome()
    scheduler.send(number=1, plan=BEGIN)
    scheduler.expect("result")
    scheduler.send(number=7, ping=plan_pb2.Ping(last_plan=1))
    assert scheduler.expect("pong").pong.last_plan == 1
    scheduler.send(number=8, ping=plan_pb2.Ping(last_plan=2))
    assert scheduler.expect("event").event.resend_from == 2
    assert scheduler.expect("pong").number == 8


def test_a_broken_backend_is_reported_and_ends_the_process(scheduler: FakeScheduler, start: Start) -> None:
    runner = start()

    def fail(batch: object) -> None:
        raise RuntimeError("the device is gone")

    runner.backend.on_step = fail
    runner.backend.is_broken_by = lambda error: True  # type: ignore[method-assign]
    scheduler.welcome()
    scheduler.send(number=1, plan=BEGIN)
    assert "the device is gone" in scheduler.expect("event").event.fault
    runner.join()
    assert isinstance(runner.error, BrokenBackend)
    assert scheduler.receive(0.5) is None, "it can't execute plans, so it must not send Hello"


def test_a_runner_whose_group_is_given_up_says_why_and_no_hello(scheduler: FakeScheduler, start: Start) -> None:
    runner = start()
    scheduler.welcome()
    scheduler.send(number=1, plan=BEGIN)
    scheduler.expect("result")
    runner.runner.why = "rank 2 (pid 7) was ended by signal 9"
    assert scheduler.expect("event").event.fault == runner.runner.why
    runner.join()
    assert isinstance(runner.error, RankLost) and str(runner.error) == runner.runner.why
    assert scheduler.receive(0.5) is None, "it serves again once the group has formed"


def test_a_plan_under_way_when_the_group_is_given_up_is_one_fault(scheduler: FakeScheduler, start: Start) -> None:
    runner = start()

    def lose(batch: object) -> None:
        runner.runner.why = "rank 1 is gone"
        raise RankLost("the connection broke")

    runner.backend.on_step = lose
    scheduler.welcome()
    scheduler.send(number=1, plan=BEGIN)
    scheduler.send(number=2, plan=decode(3))
    assert scheduler.expect("event").event.fault == "rank 1 is gone"
    runner.join()
    assert isinstance(runner.error, RankLost)
    while (message := scheduler.receive(0.5)) is not None:
        assert message.WhichOneof("body") == "event", "no Hello follows"


def test_the_next_socket_reports_what_a_former_one_has_heard(scheduler: FakeScheduler, start: Start) -> None:
    runner = start()
    scheduler.expect("hello")
    scheduler.send(session=1, welcome=plan_pb2.Welcome(term=4, term_id=5, features=sorted(OURS)))
    scheduler.send(session=1, number=1, ping=plan_pb2.Ping(longest_context=700))
    scheduler.expect("pong")
    runner.link.stop()
    runner.join()
    link = PlanSocket(Runner(SpyBackend(), "spy"), scheduler.endpoint)
    link.remember(runner.link.heard)
    thread = threading.Thread(target=link.run)
    thread.start()
    try:
        message = scheduler.receive()
        while message is not None and message.WhichOneof("body") != "hello":
            message = scheduler.receive()
        assert message is not None
        assert (message.hello.term, message.hello.term_id, message.hello.longest_context) == (4, 5, 700)
    finally:
        link.stop()
        thread.join()


def test_a_runner_without_a_scheduler_sends_hello_only_when_idle(scheduler: FakeScheduler, start: Start) -> None:
    runner = start(silence_s=0.3)
    release = runner.hold_steps()
    scheduler.welcome()
    scheduler.send(number=1, plan=BEGIN)
    scheduler.send(number=1, ping=plan_pb2.Ping())
    scheduler.expect("pong")
    assert scheduler.receive(1.5) is None, "no Hello, which would request plans"
    release()
    kinds = {scheduler.receive(10).WhichOneof("body"), scheduler.receive(10).WhichOneof("body")}  # type: ignore[union-attr]
    assert kinds == {"result", "hello"}


def test_a_hung_plan_ends_the_process_once_no_scheduler_waits(scheduler: FakeScheduler, start: Start) -> None:
    runner = start(silence_s=0.5, plan_timeout_s=1.0)
    release = runner.hold_steps()
    scheduler.welcome()
    scheduler.send(number=1, plan=BEGIN)
    for number in range(1, 21):  # the scheduler still waits for the plan
        scheduler.send(number=number, ping=plan_pb2.Ping(last_plan=1))
        scheduler.expect("pong")
        time.sleep(0.1)
    assert runner.error is None
    runner.join()
    assert isinstance(runner.error, HungBackend)
    release()


def test_terms_are_pairs_and_ids_are_sent_only_to_peers_with_the_feature(
    scheduler: FakeScheduler, start: Start
) -> None:
    start()
    hello = scheduler.expect("hello").hello
    assert (hello.term, hello.term_id, list(hello.features)) == (0, 0, sorted(OURS))
    scheduler.send(session=1, welcome=plan_pb2.Welcome(term=10, term_id=5, features=[TERMS, "of a later release"]))
    answers = [
        ({"session": 2, "welcome": plan_pb2.Welcome(term=10, term_id=4, features=[TERMS])}, (10, 5)),
        ({"session": 3, "welcome": plan_pb2.Welcome(term=9, term_id=7)}, (10, 0)),
        ({"session": 4, "welcome": plan_pb2.Welcome(term=10)}, (10, 0)),
        ({"session": 5, "ping": plan_pb2.Ping()}, (10, 0)),
    ]
    for message, told in answers:
        scheduler.send(**message)  # type: ignore[arg-type]
        event = scheduler.expect("event").event
        assert (event.fenced, event.fenced_id) == told
    scheduler.send(session=6, welcome=plan_pb2.Welcome(term=10, term_id=6, features=[TERMS]))
    scheduler.send(session=6, number=1, ping=plan_pb2.Ping())
    scheduler.expect("pong")
    scheduler.send(session=1, number=1, plan=BEGIN)  # of its first session, whose scheduler has the feature
    event = scheduler.expect("event").event
    assert (event.fenced, event.fenced_id) == (10, 6)


def test_hello_has_the_longest_context_of_any_ping(scheduler: FakeScheduler, start: Start) -> None:
    start(silence_s=0.3)
    assert not scheduler.expect("hello").hello.longest_context
    scheduler.send(session=1, welcome=plan_pb2.Welcome(term=1, features=sorted(OURS)))
    for longest in (700, 900, 0):
        scheduler.send(session=1, number=1, ping=plan_pb2.Ping(longest_context=longest))
        scheduler.expect("pong")
    assert scheduler.expect("hello").hello.longest_context == 900


def test_hello_has_the_greatest_term_of_any_ping(scheduler: FakeScheduler, start: Start) -> None:
    start(silence_s=0.3)
    scheduler.expect("hello")
    scheduler.send(session=1, welcome=plan_pb2.Welcome(term=1, term_id=5, features=[TERMS]))
    for term, term_id in ((7, 3), (6, 9), (0, 0)):
        scheduler.send(session=1, number=1, ping=plan_pb2.Ping(term=term, term_id=term_id))
        scheduler.expect("pong")
    hello = scheduler.expect("hello").hello
    assert (hello.term, hello.term_id) == (7, 3)
    scheduler.send(session=2, welcome=plan_pb2.Welcome(term=7, term_id=2))
    assert scheduler.expect("event").event.fenced == 7


class Named:
    """A runner whose host pool holds a named block."""

    def __init__(self) -> None:
        self.runner = Runner(SpyBackend(), copier=ThreadCopier(SpyBackend().cache_regions, 2))

    def hello_at(self, endpoint: str, **options: CurveClient) -> plan_pb2.Hello:
        """Returns the Hello for a scheduler at `endpoint` after a session that named a block."""
        link = PlanSocket(self.runner, endpoint, **options)
        self.runner.reset(b"secret")
        self.runner.execute(1, plan(offloads=[[(1, 1, bytes(20))]]))
        sent: list[bytes] = []
        link._connection.send = lambda frame: bool(sent.append(frame)) or True  # type: ignore[method-assign]
        link._greet(time.monotonic())
        link._connection.close()
        link._wake.close(linger=0)
        link._context.term()
        return plan_pb2.ToScheduler.FromString(sent[0]).hello


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        ("tcp://127.0.0.1:5", True),
        ("tcp://localhost:5", True),
        ("tcp://[::1]:5", True),
        ("tcp://192.0.2.1:5", False),
        ("tcp://127.0.0.1:0;192.0.2.1:5", False),
        ("tcp://[::]:5", False),
        ("ipc:///tmp/roster-named", True),
    ],
)
def test_the_naming_secret_is_told_only_where_nobody_listens(endpoint: str, told: bool) -> None:
    assert Named().hello_at(endpoint).naming_secret == (b"secret" if told else b"")


def test_the_naming_secret_is_told_through_curve() -> None:
    public, secret = zmq.curve_keypair()
    hello = Named().hello_at("tcp://192.0.2.1:5", curve=CurveClient(secret, public, public))
    assert hello.naming_secret == b"secret"
    assert (hello.num_host_blocks, hello.HasField("model")) == (2, True)


def test_a_welcome_brings_the_secret_and_the_next_hello_returns_it(scheduler: FakeScheduler) -> None:
    link = PlanSocket(
        Runner(SpyBackend(), copier=ThreadCopier(SpyBackend().cache_regions, 2)), scheduler.endpoint, silence_s=0.3
    )
    thread = threading.Thread(target=link.run)
    thread.start()
    assert scheduler.expect("hello").hello.naming_secret == b""
    scheduler.send(welcome=plan_pb2.Welcome(term=1, features=sorted(OURS), naming_secret=b"secret"))
    scheduler.send(number=1, plan=plan(offloads=[[(1, 1, b"n" * 20)]]))
    assert ints(scheduler.expect("result").result.offloads_done) == [1]
    assert scheduler.expect("hello").hello.naming_secret == b"secret"  # after silence
    scheduler.session = 2
    scheduler.send(welcome=plan_pb2.Welcome(term=2, features=sorted(OURS), naming_secret=b"secret"))
    scheduler.send(snapshot_request=plan_pb2.SnapshotRequest())
    snapshot = scheduler.expect("snapshot").snapshot
    assert (ints(snapshot.host_blocks), snapshot.host_tags) == ([1], b"n" * 20)
    scheduler.session = 3
    scheduler.send(welcome=plan_pb2.Welcome(term=3, features=sorted(OURS), naming_secret=b"other"))
    scheduler.send(snapshot_request=plan_pb2.SnapshotRequest())
    assert not scheduler.expect("snapshot").snapshot.host_blocks
    link.stop()
    thread.join(20)
