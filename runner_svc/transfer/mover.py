"""A runner's part in moves: keeps the grants of its session, and pulls blocks in threads of its own.

Short pulls have their own thread: the last blocks of a sequence that waits for them must not wait for the many blocks
of another one. A new session ends all grants, and waits for the pulls under way: their blocks may be used right after.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import structlog

from roster_protos import plan_pb2
from runner_svc.batch.plan_columns import PlanFault, int32_column
from runner_svc.transfer.grants import Grants
from runner_svc.transfer.transport import PullFailed, PullOrder, Transport, Unreachable

SHORT_PULL = 32
"""Blocks of a short pull, at most."""
_MOST_REMEMBERED = 8192  # pulls whose answer may have to be repeated

_GRANTED, _DONE, _FAILED = (
    plan_pb2.MOVE_OUTCOME_GRANTED,
    plan_pb2.MOVE_OUTCOME_DONE,
    plan_pb2.MOVE_OUTCOME_FAILED,
)

log = structlog.get_logger()


class Mover:
    """Called by the socket's thread, which sends what it finds in `finished`."""

    def __init__(self, grants: Grants, transports: Sequence[Transport], num_blocks: int) -> None:
        """`transports`: the one to try first comes first."""
        self._grants = grants
        self._transports = transports
        self._num_blocks = num_blocks
        self.finished: deque[plan_pb2.ToScheduler] = deque()
        self.wake: Callable[[], None] = lambda: None
        """Called in another thread, once `finished` has another message."""
        self.close_source: Callable[[], None] = lambda: None
        """Ends what serves this runner's blocks."""
        self.endpoint = self.public_key = self.memory = self.format = ""
        """What Hello says of this runner."""
        self._session = 0
        self._answers: OrderedDict[bytes, plan_pb2.Moved | None] = OrderedDict()  # by key; None: not ended
        self._idle = threading.Condition()
        self._num_pulling = 0
        self._short: SimpleQueue[tuple[int, PullOrder] | None] = SimpleQueue()
        self._long: SimpleQueue[tuple[int, PullOrder] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=name, daemon=True)
            for name, queue in (("moves-short", self._short), ("moves-long", self._long))
        ]
        for thread in self._threads:
            thread.start()

    def begin_session(self, session: int) -> None:
        """Ends all grants and pulls of the session before, and waits for the pulls under way."""
        self._session = session
        self._grants.clear()
        with self._idle:
            self._idle.wait_for(lambda: not self._num_pulling)
        self._answers.clear()

    def close(self) -> None:
        """Ends the threads, after the pulls under way, and what serves this runner's blocks."""
        self.close_source()
        self._session = -1
        for queue in (self._short, self._long):
            queue.put(None)
        for thread in self._threads:
            thread.join()

    # ------------------------------------------------------------------ messages

    def take(self, message: plan_pb2.ToRunner) -> None:
        """Handles a grant, a pull or a revoke of the current session."""
        kind = message.WhichOneof("body")
        try:
            if kind == "grant":
                grant = message.grant
                self._grants.add(grant.key, int32_column("grant", grant.blocks), grant.reader)
                self._answer(plan_pb2.Moved(key=grant.key, outcome=_GRANTED))
            elif kind == "revoke":
                self._grants.remove(message.revoke.key)
            elif kind == "pull":
                self._pull(message.pull)
        except (ValueError, PlanFault) as error:
            log.error("moves: a message can't be carried out", kind=kind, reason=str(error))
            if kind == "pull":
                self._answer(plan_pb2.Moved(key=message.pull.key, outcome=_FAILED, reason=str(error)))

    def _pull(self, pull: plan_pb2.Pull) -> None:
        """Queues a pull. One that is queued or under way is ignored, and one that has ended is answered again."""
        if pull.key in self._answers:
            answer = self._answers[pull.key]
            if answer is not None:
                self._answer(answer)
            return
        order = PullOrder(
            pull.key,
            pull.endpoint,
            pull.source.encode(),
            pull.memory,
            int32_column("pull sources", pull.sources),
            int32_column("pull targets", pull.targets),
        )
        targets = order.targets
        if len(order.sources) != len(targets) or not len(targets):
            raise ValueError(f"a pull has {len(order.sources)} sources and {len(targets)} targets")
        if not (int(targets.min()) >= 1 and int(targets.max()) <= self._num_blocks):
            raise ValueError(f"a pull names a target outside 1 to {self._num_blocks}")
        self._answers[pull.key] = None
        queue = self._short if len(targets) <= SHORT_PULL else self._long
        queue.put((self._session, order))

    def _answer(self, moved: plan_pb2.Moved) -> None:
        self.finished.append(plan_pb2.ToScheduler(session=self._session, moved=moved))

    # ------------------------------------------------------------------ the threads

    def _run(self, queue: SimpleQueue[tuple[int, PullOrder] | None]) -> None:
        while (job := queue.get()) is not None:
            session, order = job
            with self._idle:
                if session != self._session:
                    continue
                self._num_pulling += 1
            try:
                moved = self._pulled(order, lambda session=session: session != self._session)  # type: ignore[misc]
            finally:
                with self._idle:
                    self._num_pulling -= 1
                    self._idle.notify_all()
            if session == self._session:
                self._answers[order.key] = moved
                while len(self._answers) > _MOST_REMEMBERED and next(iter(self._answers.values())) is not None:
                    self._answers.popitem(last=False)
                self.finished.append(plan_pb2.ToScheduler(session=session, moved=moved))
                self.wake()

    def _pulled(self, order: PullOrder, is_cancelled: Callable[[], bool]) -> plan_pb2.Moved:
        """Pulls with the first transport that reaches the source; returns the answer."""
        began_at = time.monotonic()
        reason = "no transport reaches the source"
        for transport in self._transports:
            try:
                num_bytes = transport.pull(order, is_cancelled)
            except Unreachable as error:
                log.debug("moves: a transport does not reach the source", transport=transport.name, reason=str(error))
                continue
            except PullFailed as error:
                reason = str(error)
                break
            except Exception as error:
                log.exception("moves: a pull failed")
                reason = f"{type(error).__name__}: {error}"
                break
            return plan_pb2.Moved(
                key=order.key,
                outcome=_DONE,
                num_bytes=num_bytes,
                duration_us=int((time.monotonic() - began_at) * 1e6),
                transport=transport.name,
            )
        return plan_pb2.Moved(key=order.key, outcome=_FAILED, reason=reason)
