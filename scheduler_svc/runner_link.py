"""The scheduler's end of the link to runners: one ROUTER socket, sessions, heartbeats, resending.

A session begins with a Hello and ends when the runner is lost: silent for too long, holding a plan for too long,
faulted, unreachable, or replaced by a new process of the same name. Messages of any other session are dropped. Plans
are kept until their results are here, so a gap that the runner reports is sent again. If this process itself was
paused, nobody is declared dead for it: the timers start again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
import zmq
from google.protobuf.message import DecodeError

from protos import plan_pb2
from scheduler_svc.curve import CurveServer

PROTOCOL_VERSION = 1
PING_INTERVAL_S = 1.0
PAUSE_S = 2.0
"""The engine looks here at least every half second; a longer silence means that it was stopped itself."""

log = structlog.get_logger()


@dataclass(slots=True, frozen=True)
class Joined:
    """A runner said hello; `welcome` or `reject` answers."""

    session: int
    hello: plan_pb2.Hello


@dataclass(slots=True, frozen=True)
class GotResult:
    """A result of a runner in session."""

    session: int
    number: int
    result: plan_pb2.Result


@dataclass(slots=True, frozen=True)
class Lost:
    """A session ended: nothing more comes of it."""

    session: int
    reason: str


RunnerEvent = Joined | GotResult | Lost


@dataclass(slots=True)
class Peer:
    """One runner process, as seen from here."""

    identity: bytes
    session: int
    runner_id: str
    heard_s: float
    pinged_s: float
    welcomed: bool = False
    pings: int = 0
    unacknowledged: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    """Plan number -> (frame, when sent), oldest first."""


class RunnerLink:
    """Not thread-safe: the socket belongs to the engine's thread."""

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
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        if curve is not None:
            curve.protect(self.socket)
        self.socket.bind(endpoint)
        self.endpoint: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._silence_s = silence_s
        self._plan_timeout_s = plan_timeout_s
        self._clock = clock
        self._peers: dict[bytes, Peer] = {}
        self._sessions: dict[int, Peer] = {}
        self._looked_s = clock()
        self._lost: list[Lost] = []  # found while sending; told at the next receive

    def close(self) -> None:
        """Closes the socket."""
        self.socket.close()

    # ------------------------------------------------------------------ receiving

    def receive(self) -> list[RunnerEvent]:
        """All that has come since the last call, in order, then whoever was lost. Never blocks."""
        now_s = self._clock()
        if now_s - self._looked_s > PAUSE_S:
            self._forgive(now_s)
        self._looked_s = now_s
        events: list[RunnerEvent] = []
        while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 1:  # not a runner of ours
                continue
            frame = frames[0]
            try:
                message = plan_pb2.ToScheduler.FromString(frame)
            except DecodeError:
                log.warning("runner link: a frame that is no message", bytes=len(frame))
                continue
            events.extend(self._take(identity, message, now_s))
        self._look_after_peers(now_s)
        events.extend(self._lost)
        self._lost = []
        return events

    def _take(self, identity: bytes, message: plan_pb2.ToScheduler, now_s: float) -> list[RunnerEvent]:
        kind = message.WhichOneof("body")
        peer = self._peers.get(identity)
        if kind == "hello":
            return self._greet(identity, message, peer, now_s)
        if peer is None or message.session != peer.session:
            return []  # of an older session: whoever sends it is about to hear of the new one
        peer.heard_s = now_s
        if kind == "result":
            peer.unacknowledged.pop(message.number, None)
            return [GotResult(peer.session, message.number, message.result)]
        if kind == "event":
            self._event(peer, message.event)
        return []

    def _greet(
        self, identity: bytes, message: plan_pb2.ToScheduler, peer: Peer | None, now_s: float
    ) -> list[RunnerEvent]:
        hello = message.hello
        if peer is not None:
            peer.heard_s = now_s
            if peer.welcomed:  # it has not heard of us for a while, or our Welcome crossed its Hello
                if message.session == peer.session:
                    self._ping(peer, now_s)
                else:
                    self.welcome(peer.session)
            return []
        events: list[RunnerEvent] = []
        for other in list(self._peers.values()):
            if other.runner_id == hello.runner_id:
                self.drop(other.session, "replaced by a new process of the same name")
        events.extend(self._lost)
        self._lost = []
        peer = Peer(identity, secrets.randbits(63) | 1, hello.runner_id, now_s, now_s)
        self._peers[identity] = self._sessions[peer.session] = peer
        return [*events, Joined(peer.session, hello)]

    def _event(self, peer: Peer, event: plan_pb2.Event) -> None:
        kind = event.WhichOneof("kind")
        if kind == "fault":
            self.drop(peer.session, f"it refused a plan or failed half way: {event.fault}")
        elif kind == "resend_from":
            for number, (frame, _) in peer.unacknowledged.items():
                if number >= event.resend_from:
                    self._send(peer, frame)
        elif kind == "draining" and event.draining:
            self.drop(peer.session, "it leaves")

    def _look_after_peers(self, now_s: float) -> None:
        for peer in list(self._peers.values()):
            if now_s - peer.heard_s > self._silence_s:
                self.drop(peer.session, f"silent for {now_s - peer.heard_s:.1f} s")
            elif peer.unacknowledged and now_s - next(iter(peer.unacknowledged.values()))[1] > self._plan_timeout_s:
                self.drop(peer.session, f"it has held a plan for more than {self._plan_timeout_s:.0f} s")
            elif peer.welcomed and now_s - peer.pinged_s > PING_INTERVAL_S:
                self._ping(peer, now_s)

    def _forgive(self, now_s: float) -> None:
        for peer in self._peers.values():
            peer.heard_s = now_s
            peer.unacknowledged = {number: (frame, now_s) for number, (frame, _) in peer.unacknowledged.items()}

    # ------------------------------------------------------------------ sending

    def welcome(self, session: int) -> None:
        """Opens the session: the runner drops whatever it held. Nothing happens if the session was lost meanwhile."""
        peer = self._sessions.get(session)
        if peer is None:
            return
        peer.welcomed = True
        self._send(peer, plan_pb2.ToRunner(session=session, welcome=plan_pb2.Welcome()).SerializeToString())

    def reject(self, session: int, reason: str) -> None:
        """Tells the runner why it can't serve here, and forgets it."""
        peer = self._sessions.get(session)
        if peer is None:
            return
        rejection = plan_pb2.Rejection(reason=reason)
        self._send(peer, plan_pb2.ToRunner(session=session, rejection=rejection).SerializeToString())
        self._forget(session)

    def send_plan(self, session: int, number: int, plan: plan_pb2.Plan) -> None:
        """Sends the plan and keeps it until its result is here. A runner that is gone is told at the next `receive`."""
        peer = self._sessions.get(session)
        if peer is None:
            return
        frame = plan_pb2.ToRunner(session=session, number=number, plan=plan).SerializeToString()
        peer.unacknowledged[number] = (frame, self._clock())
        self._send(peer, frame)

    def drop(self, session: int, reason: str) -> None:
        """Ends the session; the next `receive` says Lost."""
        if self._forget(session) is not None:
            self._lost.append(Lost(session, reason))

    def _forget(self, session: int) -> Peer | None:
        peer = self._sessions.pop(session, None)
        if peer is not None:
            del self._peers[peer.identity]
        return peer

    def _ping(self, peer: Peer, now_s: float) -> None:
        peer.pinged_s = now_s
        peer.pings += 1
        message = plan_pb2.ToRunner(session=peer.session, number=peer.pings, ping=plan_pb2.Ping())
        self._send(peer, message.SerializeToString())

    def _send(self, peer: Peer, frame: bytes) -> None:
        try:
            self.socket.send_multipart((peer.identity, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.drop(peer.session, f"unreachable: {error}")
