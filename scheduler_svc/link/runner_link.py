"""The scheduler's end of the link to runners: one ROUTER socket, sessions, heartbeats, resending, fencing.

A session begins with a Hello and ends when the runner is lost (`Loss` lists the causes). Messages of other sessions are
dropped. Plans are kept until their results arrive, and results are delivered in order. Lost, duplicated or reordered
messages are recovered by resending, at the latest with the next heartbeat. If this process itself was paused, no runner
is declared lost for it: the timers restart.

A killed process is noticed at once: the socket reports that some connection broke, but not which one. So every peer is
pinged, and the send to a lost one fails.

Terms fence schedulers (`terms`): a runner answers only the greatest term. A scheduler that has sent plans and learns of
a greater term has a successor. If a newcomer's id belongs to another runner, a ping of that runner decides
(`name_contests`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import structlog
import zmq
from google.protobuf.message import DecodeError

from roster_common.curve_server import CurveServer
from roster_common.link_protocol import CONTEXTS, MOVES, OURS, TERMS, shared
from roster_protos import plan_pb2
from scheduler_svc.link.name_contests import NameContests
from scheduler_svc.link.runner_events import (
    Fenced,
    GotMoved,
    GotResult,
    GotSnapshot,
    Joined,
    Leaving,
    Loss,
    Lost,
    RunnerEvent,
)
from scheduler_svc.link.runner_peer import Peer
from scheduler_svc.link.runner_socket import RunnerSocket
from scheduler_svc.link.terms import GREATEST_NUMBER, OwnTerm, Term

PING_INTERVAL_S = 1.0
"""Several pings fit into the default `runner_timeout_s`, 10 s, so that one lost ping loses no runner."""
PAUSE_S = 2.0
"""The engine calls `receive` at least every half second; a longer gap means that this process was stopped."""
PROBES_S = (0.0, 0.02, 0.1)
"""Delays of the pings to all runners after a connection broke: the monitor may report it before the socket does."""

log = structlog.get_logger()


class RunnerLink:
    """Not thread-safe: the sockets belong to the engine's thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        silence_s: float,
        plan_timeout_s: float,
        clock: Callable[[], float],
        curve: CurveServer | None = None,
    ) -> None:
        """`curve`: only runners with an allowed key may connect, encrypted. None: any process may connect."""
        self._socket = RunnerSocket(context, endpoint, curve)
        self.endpoint = self._socket.endpoint
        self._own_term = OwnTerm()
        self._longest_context = 0  # of the welcomed runners
        self._silence_s = silence_s
        self._pause_s = min(PAUSE_S, max(PAUSE_S / 2, silence_s / 2))
        self._plan_timeout_s = plan_timeout_s
        self._clock = clock
        self._peers: dict[bytes, Peer] = {}
        self._sessions: dict[int, Peer] = {}
        self._opened: set[int] = set()  # every session opened by this process
        self._looked_at = clock()
        self._probes: list[float] = []
        self._pending: list[RunnerEvent] = []  # found while sending; reported at the next receive
        self._contests = NameContests(self._sessions, self._ping, self.drop, self._socket.send)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """Sockets to poll for input."""
        return self._socket.sockets

    @property
    def wake_at(self) -> float:
        """When `receive` has work even if no message arrives."""
        return min(self._probes[0] if self._probes else float("inf"), self._contests.due_at)

    @property
    def term(self) -> Term:
        """This scheduler's term; without a number until the first runner says hello."""
        return self._own_term.term

    def close(self) -> None:
        """Closes the sockets."""
        self._socket.close()

    # ------------------------------------------------------------------ receiving

    def receive(self) -> list[RunnerEvent]:
        """Returns all events since the last call, in order, then the lost sessions. Never blocks."""
        now_s = self._clock()
        if now_s - self._looked_at > self._pause_s:
            for peer in self._peers.values():
                peer.forgive(now_s)
            self._contests.forgive(now_s)
        self._looked_at = now_s
        events: list[RunnerEvent] = []
        for identity, frame in self._socket.frames():
            try:
                message = plan_pb2.ToScheduler.FromString(frame)
            except DecodeError:
                log.warning("runner link: a frame that is no message", bytes=len(frame))
                continue
            events += self._take(identity, message, now_s)
        self._probe(now_s)
        self._look_after_peers(now_s)
        for newcomer in self._contests.decided(now_s):
            events += self._greet(newcomer.identity, newcomer.hello, None, now_s)
        events += self._pending
        self._pending = []
        return events

    def _take(self, identity: bytes, message: plan_pb2.ToScheduler, now_s: float) -> list[RunnerEvent]:
        kind = message.WhichOneof("body")
        peer = self._peers.get(identity)
        if kind == "hello":
            return self._greet(identity, message, peer, now_s)
        if kind == "event" and message.event.fenced:
            return self._fenced(message, peer)
        if peer is None or message.session != peer.session:
            return []  # of an older session: its sender is about to learn of the new one
        peer.heard_at = now_s
        peer.entered = True
        if kind == "result":
            return self._result(peer, message)
        if kind == "event":
            return self._event(peer, message.event)
        if kind == "snapshot" and peer.snapshot_asked_at is not None:
            peer.snapshot_asked_at = None
            return [GotSnapshot(peer.session, message.snapshot)]
        if kind == "moved":
            return [GotMoved(peer.session, message.moved)]
        if kind == "pong":
            self._send_again(peer, lambda number: number <= message.pong.last_plan)
            self._contests.answered(peer, message.number)
        return []

    def _meet(self, theirs: Term) -> list[RunnerEvent]:
        """Handles a term reported by a runner; if this process raises its own, informs all runners at once."""
        before = self.term
        if not self._own_term.meet(theirs):
            self._tell_term(theirs)
            return [Fenced(theirs)]
        if self.term != before:
            self._tell_term(self.term)
        return []

    def _fenced(self, message: plan_pb2.ToScheduler, peer: Peer | None) -> list[RunnerEvent]:
        """Handles a runner that belongs to another scheduler: final, unless this process can still raise its term."""
        theirs = Term(message.event.fenced, message.event.fenced_id)
        if theirs <= self.term or theirs.number > GREATEST_NUMBER:
            return []
        if peer is not None and peer.session == message.session:
            self.drop(peer.session, "it belongs to another scheduler", Loss.SILENT)
        return self._meet(theirs)

    def _result(self, peer: Peer, message: plan_pb2.ToScheduler) -> list[RunnerEvent]:
        if message.number > peer.last_plan:
            self.drop(peer.session, f"a result of plan {message.number}, which was never sent", Loss.UNSOUND)
            return []
        ready = peer.take_result(message.number, message.result)
        missing = peer.missing_result
        if missing is not None:
            self._send_again(peer, lambda number: number == missing)
        return [GotResult(peer.session, number, result) for number, result in ready]

    def _greet(
        self, identity: bytes, message: plan_pb2.ToScheduler, peer: Peer | None, now_s: float
    ) -> list[RunnerEvent]:
        hello = message.hello
        theirs = Term(hello.term, hello.term_id)
        if theirs.number > GREATEST_NUMBER:
            log.warning("runner link: a term that can't be", runner=hello.runner_id, number=theirs.number)
            return []
        if fenced := self._meet(theirs):
            return fenced
        if peer is not None:
            peer.heard_at = now_s
            if peer.welcome is None:
                return []
            if message.session == peer.session:  # it has received nothing for a while
                self._ping(peer, now_s)
                return []
            if not peer.entered:  # our Welcome was lost, or crossed its Hello
                self._welcome(peer, peer.welcome)
                return []
            self.drop(peer.session, "it is in another session", Loss.SILENT)
        if self._contests.holds_up(identity, message, now_s):
            return []
        return self._join(identity, message, now_s)

    def _join(self, identity: bytes, message: plan_pb2.ToScheduler, now_s: float) -> list[RunnerEvent]:
        hello, former = message.hello, message.session
        lost, self._pending = self._pending, []
        features = shared(hello.features)
        peer = Peer(identity, secrets.randbits(63) | 1, hello.runner_id, now_s, now_s, features)
        peer.longest_context = max(hello.model.context_length, hello.longest_context)
        self._peers[identity] = self._sessions[peer.session] = peer
        holds = former != 0 and former not in self._opened
        self._opened.add(peer.session)
        return [*lost, Joined(peer.session, hello, former, holds)]

    def _event(self, peer: Peer, event: plan_pb2.Event) -> list[RunnerEvent]:
        kind = event.WhichOneof("kind")
        if kind == "fault":
            loss = Loss.of_fault(event.fault)
            self.drop(peer.session, f"it refused a plan or failed while executing it: {event.fault}", loss)
        elif kind == "resend_from":
            self._send_again(peer, lambda number: number >= event.resend_from)
            for frame in peer.kept_masks():  # of earlier plans too: it can't know that it lacks them
                self._send(peer, frame)
        elif kind == "draining" and event.draining and not peer.leaving:
            peer.leaving = True
            return [Leaving(peer.session)]
        return []

    # ------------------------------------------------------------------ watching

    def _probe(self, now_s: float) -> None:
        """Pings all runners after the monitor reported a broken connection, to find which one it was."""
        if self._socket.connection_broke():
            self._probes = [now_s + delay_s for delay_s in PROBES_S]
        if self._probes and self._probes[0] <= now_s:
            self._probes = [at_s for at_s in self._probes if at_s > now_s]
            for peer in list(self._peers.values()):
                if peer.welcome is not None:
                    self._ping(peer, now_s)

    def _look_after_peers(self, now_s: float) -> None:
        for peer in list(self._peers.values()):
            debt_s = peer.oldest_debt_s
            if now_s - peer.heard_at > self._silence_s:
                self.drop(peer.session, f"silent for {now_s - peer.heard_at:.1f} s", Loss.SILENT)
            elif debt_s is not None and now_s - debt_s > self._plan_timeout_s:
                self.drop(peer.session, f"it has owed a result for more than {self._plan_timeout_s:.0f} s", Loss.HUNG)
            elif peer.welcome is not None and now_s - peer.pinged_at > PING_INTERVAL_S:
                self._ping(peer, now_s)
                if peer.snapshot_asked_at is not None:
                    self._ask_for_snapshot(peer)

    # ------------------------------------------------------------------ sending

    def welcome(self, session: int, naming_secret: bytes = b"") -> None:
        """Opens the session: the runner drops all state, but may keep a host pool named with this secret, which
        GotSnapshot then reports. A no-op if the session is lost."""
        self._open(session, plan_pb2.Welcome(naming_secret=naming_secret), bool(naming_secret))

    def resume(self, session: int, naming_secret: bytes = b"") -> None:
        """Opens the session with the state that the runner holds; GotSnapshot reports that state."""
        self._open(session, plan_pb2.Welcome(resume=True, naming_secret=naming_secret), True)

    def _open(self, session: int, welcome: plan_pb2.Welcome, asks: bool) -> None:
        """Sends the Welcome; `asks`: also a SnapshotRequest."""
        peer = self._sessions.get(session)
        if peer is not None:
            peer.snapshot_asked_at = self._clock() if asks else None
            self._welcome(peer, welcome)

    def reject(self, session: int, reason: str) -> None:
        """Rejects the runner with the reason and forgets it."""
        peer = self._sessions.get(session)
        if peer is None:
            return
        rejection = plan_pb2.Rejection(reason=reason)
        self._send(peer, plan_pb2.ToRunner(session=session, rejection=rejection).SerializeToString())
        self.dismiss(session)

    def send_plan(self, session: int, number: int, plan: plan_pb2.Plan) -> None:
        """Sends the plan and keeps it until its result arrives. The loss of the runner shows in the next `receive`."""
        peer = self._sessions.get(session)
        if peer is None:
            return
        self._own_term.fix()
        frame = plan_pb2.ToRunner(session=session, number=number, plan=plan).SerializeToString()
        peer.sent(number, frame, self._clock())
        self._send(peer, frame)

    def send_masks(self, session: int, number: int, masks: plan_pb2.Masks) -> None:
        """Sends masks that rows of the plan wait for, and keeps them as long as the plan."""
        peer = self._sessions.get(session)
        if peer is None:
            return
        frame = plan_pb2.ToRunner(session=session, number=number, masks=masks).SerializeToString()
        peer.sent_masks(number, frame)
        self._send(peer, frame)

    def send_move(self, session: int, message: plan_pb2.ToRunner) -> None:
        """Sends a grant, a pull, a revoke or a dismissal, which may be lost: callers repeat what needs an answer."""
        peer = self._sessions.get(session)
        if peer is not None and MOVES in peer.features:
            message.session = session
            self._send(peer, message.SerializeToString())

    def drop(self, session: int, reason: str, loss: Loss = Loss.UNSOUND) -> None:
        """Ends the session; the next `receive` reports Lost."""
        peer = self.dismiss(session)
        if peer is not None:
            self._pending.append(Lost(session, reason, Loss.LEFT if peer.leaving else loss))

    def dismiss(self, session: int) -> Peer | None:
        """Ends the session without an event."""
        peer = self._sessions.pop(session, None)
        if peer is not None:
            del self._peers[peer.identity]
        return peer

    def _welcome(self, peer: Peer, welcome: plan_pb2.Welcome) -> None:
        peer.welcome = welcome
        self._longest_context = max(self._longest_context, peer.longest_context)
        welcome.term = self.term.number
        if peer.features:
            welcome.features[:] = sorted(OURS)
        if TERMS in peer.features:
            welcome.term_id = self.term.id
        self._send(peer, plan_pb2.ToRunner(session=peer.session, welcome=welcome).SerializeToString())
        if peer.snapshot_asked_at is not None:
            self._ask_for_snapshot(peer)

    def _ask_for_snapshot(self, peer: Peer) -> None:
        request = plan_pb2.ToRunner(session=peer.session, snapshot_request=plan_pb2.SnapshotRequest())
        self._send(peer, request.SerializeToString())

    def _send_again(self, peer: Peer, wanted: Callable[[int], bool]) -> None:
        for number, (frame, _) in list(peer.unacknowledged.items()):
            if wanted(number):
                self._send(peer, frame)

    def _tell_term(self, term: Term) -> None:
        """Informs runners with that feature of the term; they report it to the scheduler that they meet next."""
        for peer in list(self._peers.values()):
            if peer.welcome is not None and TERMS in peer.features:
                self._ping(peer, self._clock(), term)

    def _ping(self, peer: Peer, now_s: float, term: Term | None = None) -> None:
        peer.pinged_at = now_s
        peer.pings += 1
        ping = plan_pb2.Ping(last_plan=peer.last_plan)
        if TERMS in peer.features:
            ping.term, ping.term_id = (term or self.term).number, (term or self.term).id
        if CONTEXTS in peer.features:
            ping.longest_context = self._longest_context
        self._send(peer, plan_pb2.ToRunner(session=peer.session, number=peer.pings, ping=ping).SerializeToString())

    def _send(self, peer: Peer, frame: bytes) -> None:
        if problem := self._socket.send(peer.identity, frame):
            self.drop(peer.session, f"unreachable: {problem}", Loss.GONE)
