"""Hello: what the runner says of itself, again and again until a scheduler answers."""

from __future__ import annotations

from roster_common.link_protocol import OURS
from roster_protos import plan_pb2
from runner_svc.execution.runner import Runner
from runner_svc.link.answer_watch import AnswerWatch
from runner_svc.link.scheduler_connection import SchedulerConnection
from runner_svc.transfer.mover import Mover

HELLO_INTERVAL_S = 1.0
RETRY_S = 0.05
"""Seconds between attempts while not connected."""
_UNANSWERED_HELLOS = 10  # number after which the socket is replaced


class Greeting:
    """The runner's Hello, and when it is sent next."""

    def __init__(
        self, runner: Runner, connection: SchedulerConnection, answers: AnswerWatch, *, is_private: bool
    ) -> None:
        """`is_private`: Hello may have the secret of the host pool's names."""
        self._runner = runner
        self._connection = connection
        self._answers = answers
        self._is_private = is_private
        self.hello = runner.hello()
        self.hello.features[:] = sorted(OURS)
        self.seeking = True
        """Whether Hello is sent until it is answered."""
        self._unanswered = 0
        self._next_at = 0.0

    def add_mover(self, mover: Mover) -> None:
        """Adds where and how blocks of this runner are read."""
        self.hello.move_endpoint, self.hello.kv_format = mover.endpoint, mover.format
        self.hello.move_key, self.hello.move_memory = mover.public_key, mover.memory

    @property
    def heard(self) -> plan_pb2.Hello:
        """The part of Hello that schedulers have reported, for the next socket of this runner."""
        own = self.hello
        return plan_pb2.Hello(term=own.term, term_id=own.term_id, longest_context=own.longest_context)

    def know(self, number: int, term_id: int) -> None:
        """Keeps the greatest term seen, which Hello reports to the next scheduler."""
        if (number, term_id) > (self.hello.term, self.hello.term_id):
            self.hello.term, self.hello.term_id = number, term_id

    def know_context(self, longest: int) -> None:
        """Keeps the longest context that a scheduler has reported."""
        self.hello.longest_context = max(self.hello.longest_context, longest)

    # ------------------------------------------------------------------ when it is sent

    def seek(self) -> None:
        """Sends Hello soon, and until it is answered."""
        self.seeking = True
        self._next_at = 0.0

    def answered(self) -> None:
        """Notes that the scheduler has sent something."""
        self._answers.heard()
        self._unanswered = 0

    def wait_s(self, now: float) -> float:
        """Returns the seconds until Hello is due."""
        return max(0.0, self._next_at - now)

    def is_due(self, now: float) -> bool:
        return self.seeking and now >= self._next_at

    def put_off(self, now: float) -> None:
        """Looks again in a moment."""
        self._next_at = now + RETRY_S

    def send(self, session: int, last_done: int, now: float) -> None:
        """Sends Hello, on a new socket after too many without an answer. `last_done`: the last plan executed."""
        if self._unanswered >= _UNANSWERED_HELLOS:
            self._unanswered = 0
            self._connection.replace()
        if self._is_private:
            self.hello.naming_secret = self._runner.naming_secret
        message = plan_pb2.ToScheduler(session=session, number=last_done, hello=self.hello)
        connected = self._connection.send(message.SerializeToString())
        self._answers.missing(now, connected)
        if connected:
            self._unanswered += 1
            self._next_at = now + HELLO_INTERVAL_S
        else:
            self._next_at = now + RETRY_S
