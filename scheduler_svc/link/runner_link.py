"""The scheduler's end of the link to runners: one ROUTER socket, sessions, heartbeats, resending, fencing.

A session begins with a Hello and ends when the runner is lost (`Loss` lists how). Messages of any other session are
dropped. Plans are kept until their results are here, and results are handed on in order: whatever was lost, doubled or
overtaken on the way is asked for again, at the latest with the next heartbeat. If this process itself was paused,
nobody is declared dead for it: the timers start again.

A killed process is noticed at once: the socket tells that some connection broke, though not whose, so every peer is
pinged, and sending to one that is gone fails.

Terms fence (`terms`): a runner answers only the greatest, and whoever has sent plans and hears of a greater one has a
successor. A newcomer whose id another runner has waits for what a ping of that one brings (`name_contests`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import structlog
import zmq
from google.protobuf.message import DecodeError

from roster_common.link_protocol import CONTEXTS, OURS, TERMS, shared
from roster_protos import plan_pb2
from scheduler_svc.link.curve import CurveServer
from scheduler_svc.link.name_contests import NameContests
from scheduler_svc.link.runner_events import Fenced, GotResult, GotSnapshot, Joined, Leaving, Loss, Lost, RunnerEvent
from scheduler_svc.link.runner_peer import Peer
from scheduler_svc.link.runner_socket import RunnerSocket
from scheduler_svc.link.terms import GREATEST_NUMBER, OwnTerm, Term

PING_INTERVAL_S = 1.0
PAUSE_S = 2.0
"""The engine looks here at least every half second; so long a gap means that it was stopped itself."""
PROBES_S = (0.0, 0.02, 0.1)
"""When everybody is pinged after a connection broke: the monitor may be quicker than the socket."""

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
        """`curve`: only runners with an allowed key get in, encrypted; None: whoever reaches the endpoint."""
        self._socket = RunnerSocket(context, endpoint, curve)
        self.endpoint = self._socket.endpoint
        self._own_term = OwnTerm()
        self._longest_context = 0  # of the runners that were welcomed
        self._silence_s = silence_s
        self._pause_s = min(PAUSE_S, max(PAUSE_S / 2, silence_s / 2))
        self._plan_timeout_s = plan_timeout_s
        self._clock = clock
        self._peers: dict[bytes, Peer] = {}
        self._sessions: dict[int, Peer] = {}
        self._opened: set[int] = set()  # every session that this process ever opened
        self._looked_at = clock()
        self._probes: list[float] = []
        self._pending: list[RunnerEvent] = []  # found while sending; told at the next receive
        self._contests = NameContests(self._sessions, self._ping, self.drop, self._socket.send)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """What to poll for input."""
        return self._socket.sockets

    @property
    def wake_at(self) -> float:
        """When `receive` has something to do even if nothing comes."""
        return min(self._probes[0] if self._probes else float("inf"), self._contests.due_at)

    @property
    def term(self) -> Term:
        """This scheduler's; without a number until the first runner says hello."""
        return self._own_term.term

    def close(self) -> None:
        """Closes the sockets."""
        self._socket.close()

    # ------------------------------------------------------------------ receiving

    def receive(self) -> list[RunnerEvent]:
        """All that has come since the last call, in order, then whoever was lost. Never blocks."""
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
            return []  # of an older session: whoever sends it is about to hear of the new one
        peer.heard_at = now_s
        peer.entered = True
        if kind == "result":
            return self._result(peer, message)
        if kind == "event":
            return self._event(peer, message.event)
        if kind == "snapshot" and peer.snapshot_asked_at is not None:
            peer.snapshot_asked_at = None
            return [GotSnapshot(peer.session, message.snapshot)]
        if kind == "pong":
            self._send_again(peer, lambda number: number <= message.pong.last_plan)
            self._contests.answered(peer, message.number)
        return []

    def _meet(self, theirs: Term) -> list[RunnerEvent]:
        """A runner tells of that term; what this process raised its own to, others hear at once."""
        before = self.term
        if not self._own_term.meet(theirs):
            self._tell_term(theirs)
            return [Fenced(theirs)]
        if self.term != before:
            self._tell_term(self.term)
        return []

    def _fenced(self, message: plan_pb2.ToScheduler, peer: Peer | None) -> list[RunnerEvent]:
        """A runner is another scheduler's. That is so for good, unless this one can still raise its term."""
        theirs = Term(message.event.fenced, message.event.fenced_id)
        if theirs <= self.term or theirs.number > GREATEST_NUMBER:
            return []
        if peer is not None and peer.session == message.session:
            self.drop(peer.session, "it is another scheduler's", Loss.SILENT)
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
            if message.session == peer.session:  # it has not heard of us for a while
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
            self.drop(peer.session, f"it refused a plan or failed half way: {event.fault}", loss)
        elif kind == "resend_from":
            self._send_again(peer, lambda number: number >= event.resend_from)
            for frame in peer.kept_masks():  # of earlier plans too: it can't tell that it lacks them
                self._send(peer, frame)
        elif kind == "draining" and event.draining and not peer.leaving:
            peer.leaving = True
            return [Leaving(peer.session)]
        return []

    # ------------------------------------------------------------------ watching

    def _probe(self, now_s: float) -> None:
        """Finds out whose connection broke, once the monitor says that one did."""
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
                self.drop(peer.session, f"it has held a plan for more than {self._plan_timeout_s:.0f} s", Loss.HUNG)
            elif peer.welcome is not None and now_s - peer.pinged_at > PING_INTERVAL_S:
                self._ping(peer, now_s)
                if peer.snapshot_asked_at is not None:
                    self._ask_for_snapshot(peer)

    # ------------------------------------------------------------------ sending

    def welcome(self, session: int) -> None:
        """Opens the session: the runner drops whatever it held. Nothing happens if the session was lost meanwhile."""
        peer = self._sessions.get(session)
        if peer is not None:
            self._welcome(peer, plan_pb2.Welcome())

    def resume(self, session: int) -> None:
        """Opens the session with what the runner holds; GotSnapshot says what that is."""
        peer = self._sessions.get(session)
        if peer is not None:
            peer.snapshot_asked_at = self._clock()
            self._welcome(peer, plan_pb2.Welcome(resume=True))

    def reject(self, session: int, reason: str) -> None:
        """Tells the runner why it can't serve here, and forgets it."""
        peer = self._sessions.get(session)
        if peer is None:
            return
        rejection = plan_pb2.Rejection(reason=reason)
        self._send(peer, plan_pb2.ToRunner(session=session, rejection=rejection).SerializeToString())
        self.dismiss(session)

    def send_plan(self, session: int, number: int, plan: plan_pb2.Plan) -> None:
        """Sends the plan and keeps it until its result is here. A runner that is gone is told at the next `receive`."""
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

    def drop(self, session: int, reason: str, loss: Loss = Loss.UNSOUND) -> None:
        """Ends the session; the next `receive` says Lost."""
        peer = self.dismiss(session)
        if peer is not None:
            self._pending.append(Lost(session, reason, Loss.LEFT if peer.leaving else loss))

    def dismiss(self, session: int) -> Peer | None:
        """Ends the session without a word."""
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
        """Runners that can take it tell their next scheduler of this term, whichever of them it meets first."""
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
