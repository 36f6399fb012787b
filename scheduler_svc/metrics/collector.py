"""Metric families of the exposition, built from a snapshot; docs/metrics.md lists them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from scheduler_svc.link.runner_events import Loss
from scheduler_svc.metrics.gateway_names import gateway_families
from scheduler_svc.metrics.histogram import HistogramState
from scheduler_svc.metrics.moves import move_families
from scheduler_svc.metrics.rank_groups import group_families
from scheduler_svc.metrics.snapshot import Snapshot
from scheduler_svc.metrics.step_phases import StepPhase
from scheduler_svc.metrics.tiers import tier_families
from scheduler_svc.model.refusal import RefusalReason
from scheduler_svc.model.sequence import FinishReason

TENANTS_SHOWN = 20
"""Maximum number of tenants with their own sample, those with the most waiting sequences; the rest is summed."""
OTHER_TENANTS = "_other"


class RosterCollector(Collector):
    """Requests a snapshot at each scrape."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: the engine may not run before the first scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yields all families. Raises what the snapshot raises."""
        snapshot = self._snapshot()
        yield from _queue(snapshot)
        yield from _work(snapshot)
        yield from _drafts(snapshot)
        yield from _latencies(snapshot)
        yield from _time(snapshot)
        yield from _runners(snapshot)
        yield from tier_families(snapshot)
        yield from move_families(snapshot)
        yield from group_families(snapshot)
        yield from _policy(snapshot)
        yield from _failures(snapshot)
        yield from gateway_families(snapshot)


def _queue(snapshot: Snapshot) -> Iterator[Metric]:
    yield _gauge("roster_waiting_sequences", "Sequences waiting for a slot.", snapshot.waiting)
    yield _gauge(
        "roster_waiting_tokens",
        "Known tokens of waiting sequences: prompts, and outputs of preempted ones.",
        snapshot.waiting_tokens,
    )
    yield _gauge(
        "roster_waiting_sequences_limit",
        "Maximum number of waiting sequences; requests beyond it are refused.",
        snapshot.waiting_limit,
    )
    text = "Maximum of roster_waiting_tokens; requests beyond it are refused."
    yield _gauge("roster_waiting_tokens_limit", text, snapshot.waiting_tokens_limit)
    text = (
        f"Waiting sequences that have not started, for each of the {TENANTS_SHOWN} tenants with the most; "
        "others are summed."
    )
    family = GaugeMetricFamily("roster_tenant_waiting_sequences", text, labels=["tenant"])
    shown = heapq.nlargest(TENANTS_SHOWN, snapshot.tenants, key=lambda item: item[1])
    for tenant, waiting in shown:
        if tenant != OTHER_TENANTS:
            family.add_metric([tenant], waiting)
    rest = sum(waiting for _, waiting in snapshot.tenants) - sum(n for name, n in shown if name != OTHER_TENANTS)
    family.add_metric([OTHER_TENANTS], rest)
    yield family


def _work(snapshot: Snapshot) -> Iterator[Metric]:
    totals = snapshot.status.totals
    yield _counter("roster_requests", "Requests accepted.", totals.requests)
    refusals = {reason.value: snapshot.refusals.get(reason, 0) for reason in RefusalReason}
    yield _counters("roster_refusals", "Requests that the engine refused or shed.", "reason", refusals)
    ends = {reason.name.lower(): snapshot.ends.get(reason, 0) for reason in FinishReason}
    yield _counters("roster_sequences_ended", "Sequences that ended.", "reason", ends)
    tokens = {"computed": totals.prefill_tokens, "cached": totals.cached_tokens}
    yield _counters("roster_prompt_tokens", "Prompt tokens, computed or reused by a prefix hit.", "source", tokens)
    yield _counter("roster_sampled_tokens", "Tokens sampled, forced ones included.", totals.sampled_tokens)
    text = "Tokens that came without a draw, because a constraint admitted no others."
    yield _counter("roster_forced_tokens", text, totals.forced_tokens)
    yield _counter("roster_preemptions", "Sequences preempted.", totals.preemptions)
    yield _counter("roster_dropped_rows", "Rows computed for sequences that had already ended.", totals.dropped_rows)
    yield _counter("roster_plans", "Plans sent to runners.", totals.plans)


def _drafts(snapshot: Snapshot) -> Iterator[Metric]:
    yield _counter("roster_decode_rows", "Rows that decoded.", snapshot.decode_rows)
    drafts = snapshot.drafts
    totals = {name: (sum(state.drafted), sum(state.accepted)) for name, state in drafts.items()}
    drafted = {name: drafted for name, (drafted, _) in totals.items()}
    yield _counters("roster_drafted_tokens", "Tokens drafted and verified.", "drafter", drafted)
    accepted = {name: accepted for name, (_, accepted) in totals.items()}
    yield _counters("roster_accepted_tokens", "Drafted tokens that were accepted.", "drafter", accepted)
    wasted = {name: drafted - accepted for name, (drafted, accepted) in totals.items()}
    yield _counters("roster_wasted_positions", "Positions of drafted tokens that were rejected.", "drafter", wasted)
    text = "Tokens drafted and verified, by position behind the last known token."
    family = CounterMetricFamily("roster_drafted_tokens_by_position", text, labels=["drafter", "position"])
    text = "Drafted tokens that were accepted, by position behind the last known token."
    kept = CounterMetricFamily("roster_accepted_tokens_by_position", text, labels=["drafter", "position"])
    for name, state in drafts.items():
        for position, (tried, right) in enumerate(zip(state.drafted, state.accepted, strict=True), 1):
            family.add_metric([name, str(position)], tried)
            kept.add_metric([name, str(position)], right)
    yield family
    yield kept
    text = "Estimated tokens per second of a runner's recent decode steps, over those without drafts; 0 if unknown."
    gain = GaugeMetricFamily("roster_draft_gain", text, labels=["runner"])
    for runner in snapshot.status.runners:
        if runner.drafter:
            gain.add_metric([runner.id], runner.draft_gain)
    yield gain


def _latencies(snapshot: Snapshot) -> Iterator[Metric]:
    yield _histogram(
        "roster_time_to_first_token_seconds", "Time from the arrival of a sequence to its first token.", snapshot.ttft_s
    )
    yield _histogram(
        "roster_inter_token_latency_seconds", "Time from one token of a sequence to the next.", snapshot.itl_s
    )
    text = "Time from arrival to the end; only sequences that ended with stop or length."
    yield _histogram("roster_request_duration_seconds", text, snapshot.e2e_s)


def _time(snapshot: Snapshot) -> Iterator[Metric]:
    yield _histogram(
        "roster_step_duration_seconds", "Time that a step takes on its runner, including transport.", snapshot.step_s
    )
    yield _histogram("roster_step_rows", "Sequences in a step's batch.", snapshot.step_rows)
    yield _histogram("roster_step_positions", "Token positions computed by a step.", snapshot.step_positions)
    phases = {phase.name.lower(): snapshot.phases_s[phase] for phase in StepPhase}
    yield _counters("roster_engine_seconds", "Time of the engine's thread, by phase of its loop.", "phase", phases)
    text = "Time that the engine's thread polled for results instead of sleeping; part of the phase wait."
    yield _counter("roster_poll_seconds", text, snapshot.poll_s)
    runners = {"run": snapshot.run_s, "idle": snapshot.idle_s}
    text = "Time of all runners: in steps, and idle between a step and the next plan."
    yield _counters("roster_runner_seconds", text, "state", runners)


def _runners(snapshot: Snapshot) -> Iterator[Metric]:
    runners = snapshot.status.runners
    yield _gauge("roster_runners", "Runners that serve.", len(runners))
    families = {
        "roster_running_sequences": ("Running sequences: those that have a slot.", lambda r: r.running),
        "roster_slots": ("Slots: maximum number of running sequences.", lambda r: r.slots),
        "roster_plans_in_flight": ("Plans sent and not yet answered.", lambda r: r.plans_in_flight),
        "roster_kv_blocks": ("KV blocks.", lambda r: r.blocks),
        "roster_kv_free_blocks": ("KV blocks that can be allocated, cached ones included.", lambda r: r.free_blocks),
        "roster_kv_cached_blocks": ("Free KV blocks that still hold a prefix.", lambda r: r.cached_blocks),
        "roster_kv_block_size_tokens": ("Tokens per KV block.", lambda r: r.block_size),
    }
    for name, (text, value) in families.items():
        family = GaugeMetricFamily(name, text, labels=["runner"])
        for runner in runners:
            family.add_metric([runner.id], value(runner))
        yield family
    text = "Age of the oldest plan that a runner has not answered; 0 if there is none."
    family = GaugeMetricFamily("roster_oldest_plan_age_seconds", text, labels=["runner"])
    for runner_id, age_s in snapshot.oldest_plans_s.items():
        family.add_metric([runner_id], age_s)
    yield family
    text = "Time before a runner runs out of work at which its next plan is made, by what the plans ahead compute."
    family = GaugeMetricFamily("roster_plan_lead_seconds", text, labels=["runner", "behind"])
    for runner_id, behind, lead_s in snapshot.leads_s:
        family.add_metric([runner_id, behind], lead_s)
    yield family
    text = "Plans that were held back and reached their runner after it had run out of work."
    yield _counter("roster_late_plans", text, snapshot.late_plans)
    held_back = snapshot.status.held_back
    yield _gauge(
        "roster_runners_held_back",
        "Runners held back after consecutive losses with a plan in flight; they receive only probes.",
        len(held_back),
    )
    text = "Consecutive losses of a runner that is held back; 0 for runners that serve."
    family = GaugeMetricFamily("roster_runner_losses_in_a_row", text, labels=["runner"])
    for runner in runners:
        family.add_metric([runner.id], 0)
    for ill in held_back:
        family.add_metric([ill.id], ill.losses)
    yield family
    yield _gauge("roster_kv_event_subscribers", "Gateways that subscribe to KV events.", snapshot.kv_subscribers)


def _policy(snapshot: Snapshot) -> Iterator[Metric]:
    status = snapshot.status
    family = InfoMetricFamily("roster_policy", "The policy in force.")
    family.add_metric([], {"policy": status.policy, "parameters": status.policy_parameters})
    yield family
    family = InfoMetricFamily("roster_retention", "The policy that decides what the prefix cache keeps.")
    family.add_metric([], {"policy": status.retention, "parameters": status.retention_parameters})
    yield family
    yield _counter("roster_policy_changes", "Policies put in force while serving.", status.totals.policy_changes)
    text = "Decisions made by the default policy because the configured one failed."
    yield _counter("roster_policy_failures", text, status.totals.policy_failures)
    text = "Calls of the policy that took longer than its timeout."
    yield _counter("roster_policy_timeouts", text, status.totals.policy_overruns)


def _failures(snapshot: Snapshot) -> Iterator[Metric]:
    losses = {loss.value: snapshot.losses.get(loss, 0) for loss in Loss}
    yield _counters("roster_runner_losses", "Runners lost, by cause.", "reason", losses)
    text = "Processes of the grammar library that died and were replaced."
    yield _counters("roster_mask_process_deaths", text, "process", snapshot.mask_process_deaths)
    recoveries = {"recomputed": snapshot.recomputed, "adopted": snapshot.adopted}
    text = "Sequences that survived the loss of their runner (recomputed) or scheduler (adopted)."
    yield _counters("roster_recovered_sequences", text, "way", recoveries)
    yield _gauge("roster_draining", "1 while the service drains.", int(snapshot.status.draining))
    yield _gauge("roster_uptime_seconds", "Time since the engine started.", snapshot.status.uptime_s)
    family = InfoMetricFamily("roster_build", "Version, profile and model of the service, and its weights' formats.")
    build = {"version": snapshot.status.version, "profile": snapshot.status.profile, "model": snapshot.model}
    build["weight_formats"] = snapshot.weight_formats
    family.add_metric([], build)
    yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _counters(name: str, text: str, label: str, values: dict[str, int] | dict[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value_of_label, value in values.items():
        family.add_metric([value_of_label], value)
    return family


def _histogram(name: str, text: str, state: HistogramState) -> Metric:
    bounds = [*(f"{bound:g}" for bound in state.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(state.counts), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=state.total)
