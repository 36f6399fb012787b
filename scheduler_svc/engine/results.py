"""Applies results in the engine: streams tokens, ends sequences, informs metrics, watchers and the policy."""

from __future__ import annotations

from scheduler_svc.constrained.mask_requests import MaskRequests
from scheduler_svc.failure.probation import Probation
from scheduler_svc.failure.runner_lifecycle import RunnerLifecycle
from scheduler_svc.failure.worthless import NOT_FINITE, is_worthless
from scheduler_svc.link.links import Runners
from scheduler_svc.link.runner_events import GotResult
from scheduler_svc.model.sequence import FinishReason, Sequence
from scheduler_svc.plan.applied_result import AppliedResult, MalformedResult
from scheduler_svc.policy import Ended
from scheduler_svc.reports.watchers import Watchers
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.placement import Placement
from scheduler_svc.runners.runner_pool import RunnerPool
from scheduler_svc.scheduler.policy_views import observation, request_view
from scheduler_svc.scheduler.scheduler import BadResult, Scheduler

_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


class Results:
    """Handles the results of all runners of one engine."""

    def __init__(
        self,
        requests: Requests,
        pool: RunnerPool,
        runners: Runners,
        placement: Placement,
        probation: Probation,
        lifecycle: RunnerLifecycle,
        watchers: Watchers,
        masks: MaskRequests,
    ) -> None:
        self._requests = requests
        self._pool = pool
        self._runners = runners
        self._placement = placement
        self._probation = probation
        self._lifecycle = lifecycle
        self._watchers = watchers
        self._masks = masks
        self._policy = requests.policy
        self._ended: list[Ended] = []  # since the policy's last observation

    def apply(self, event: GotResult) -> None:
        """Applies a result to its runner's scheduler; one that matches no plan in flight ends the session."""
        scheduler = self._pool.schedulers.get(event.session)
        if scheduler is None:
            proven = self._probation.take_result(event)
            if proven is not None:
                self._lifecycle.admit(proven)
            return
        if NOT_FINITE in event.result.statuses and is_worthless(event, scheduler, len(self._pool.schedulers)):
            self._runners.drop(event.session, "none of its results was finite")
            return
        try:
            applied = scheduler.apply(event.number, event.result)
        except (BadResult, MalformedResult) as error:
            self._runners.drop(event.session, str(error))
            return
        if applied is None:
            return
        self._pool.wake(event.session)
        if applied.flight.flags:
            self.carry_out(scheduler, applied)
        if applied.flight.awaiting:
            self._masks.look_ahead(event.session, applied)
        self._placement.touch(event.session)
        if scheduler.leaving:
            self._lifecycle.finish_drain(event.session)

    def carry_out(self, scheduler: Scheduler, applied: AppliedResult) -> None:
        """Carries out an applied result: streams tokens, ends sequences, updates rates, lets the policy observe it."""
        requests = self._requests
        now_s = requests.ledger.now_s
        self._record(applied)
        requests.measurements.applied(applied)
        if applied.drafted is not None:
            requests.measurements.verified(scheduler.hello.drafter, applied)
            requests.rate.gained(applied.num_accepted)
        if applied.num_forced:
            requests.rate.gained(applied.num_forced)
        if self._watchers.of_steps:
            self._watchers.tell_done(scheduler, applied)
        for sequence, end in applied.ends:
            requests.finish(sequence, end)
        running, waiting = scheduler.table.num_running, len(requests.queue)
        requests.rate.stepped(now_s, applied.step_s, applied.flight.decode_rows, running, waiting)
        if self._policy.observes:
            self._policy.observe(observation(scheduler.hello, applied, now_s, self._ended))
            self._ended.clear()

    def _record(self, applied: AppliedResult) -> None:
        """Charges the sampled tokens and sends them to the streams."""
        requests = self._requests
        flight = applied.flight
        requests.totals.sampled_tokens += len(applied.tokens)
        requests.totals.forced_tokens += applied.num_forced
        once = applied.drafted is None and not flight.forced
        requests.ledger.charge_sampled(flight.batch_rows.tenants, applied.rows, once)
        if applied.logprobs or applied.prompt_logprobs:
            applied.keep_logprobs()
        if len(applied.tokens) or applied.prompt_logprobs:
            requests.outbox.tokens(applied, requests.book.sole_owner)

    def note_end(self, sequence: Sequence) -> None:
        """Records a sequence that ended by STOP or LENGTH for the policy's next observation."""
        if self._policy.observes and sequence.end is not None and sequence.end.reason in _OWN_ENDS:
            self._ended.append(Ended(request_view(sequence.request), sequence.num_generated))

    def forget_ends(self) -> None:
        """Drops the recorded ends: a new policy observes only what ends after its installation."""
        self._ended.clear()
