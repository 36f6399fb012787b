"""The output of `roster status`, from `roster.admin.v1.GetStatusResponse`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from roster_client.terminal.text import one_line
from roster_protos import admin_pb2

HEADINGS = (
    "runner",
    "device",
    "model",
    "decoder",
    "slots in use",
    "free blocks",
    "block size",
    "in flight",
    "last plan",
)


def status_view(status: admin_pb2.GetStatusResponse) -> RenderableType:
    """Returns a headline, one row per runner, and the counters since the start."""
    profile = f"profile {status.profile}, " if status.profile else ""  # a scheduler from before profiles has none
    headline = Text(
        f"roster {status.version}, policy {status.policy}, {_retention(status)}{profile}up {status.uptime_s:,.0f} s, "
        f"{status.waiting} waiting ({status.waiting_tokens:,} prompt tokens)"
    )
    totals = status.totals
    counts = Text(
        f"{totals.requests:,} requests, {totals.refused:,} refused, {totals.finished:,} sequences finished, "
        f"{totals.sampled_tokens:,} tokens sampled, {totals.prefill_tokens:,} prefilled, "
        f"{totals.cached_tokens:,} from the prefix cache, {totals.preemptions:,} preemptions, {totals.plans:,} plans, "
        f"{totals.policy_changes:,} policy changes{_drafts(totals)}{_forced(totals)}"
        f"{_host_tier(totals)}{_moves(status.moves)}{_groups(status.groups)}",
        style="dim",
    )
    return Group(headline, _runners(status), *group_lines(status), *map(held_back_line, status.held_back), counts)


def _retention(status: admin_pb2.GetStatusResponse) -> str:
    """Returns what the prefix cache keeps, unless that is the default."""
    return f"retention {status.retention}, " if status.retention not in ("", "lru") else ""


def _drafts(totals: admin_pb2.Totals) -> str:
    if not totals.drafted_tokens:
        return ""
    per_row = 1 + totals.accepted_tokens / max(1, totals.decode_rows)
    return (
        f", {totals.accepted_tokens:,} of {totals.drafted_tokens:,} drafted tokens accepted "
        f"({per_row:.2f} tokens per decoding row)"
    )


def _forced(totals: admin_pb2.Totals) -> str:
    return f", {totals.forced_tokens:,} tokens forced by constraints" if totals.forced_tokens else ""


def _host_tier(totals: admin_pb2.Totals) -> str:
    tier = totals.host_tier
    if not tier.offloaded_blocks and not tier.loaded_blocks:
        return ""
    ahead = f", {tier.unused_blocks:,} of {tier.prefetched_blocks:,} loaded ahead for nothing"
    return (
        f", {tier.loaded_tokens:,} tokens loaded from host pools, {totals.swaps:,} swaps, "
        f"{tier.offloaded_blocks:,} blocks offloaded, {tier.demoted_blocks:,} demoted, "
        f"{tier.dropped_blocks:,} dropped, {tier.wasted_blocks:,} copied in vain{ahead * bool(tier.prefetched_blocks)}"
    )


def _moves(moves: admin_pb2.Moves) -> str:
    if not moves.sequences and not moves.blocks:
        return ""
    uses = ", ".join(f"{count:,} {use}" for use, count in sorted(moves.by_use.items()) if count)
    pause = f", {moves.pause_s / moves.sequences * 1e3:,.0f} ms pause each" if moves.sequences else ""
    return f", {moves.sequences:,} sequences moved ({uses}{pause}), {moves.failed:,} copies failed"


def held_back_line(runner: admin_pb2.HeldBackRunner) -> Text:
    """Returns a line about a runner in quarantine, which gets no requests, and the reason."""
    if not runner.present:
        chance = "not connected"
    elif runner.next_probe_s:
        chance = f"next probe in {runner.next_probe_s:.1f} s"
    else:
        chance = "computing a probe"
    reason = one_line(runner.reason)
    return Text(
        f"{one_line(runner.id)} is held back: {runner.losses} consecutive losses; {chance}; {reason}", style="red"
    )


def group_lines(status: admin_pb2.GetStatusResponse) -> list[Text]:
    """Returns a line for each group of ranks that is away or has lost a rank."""
    return [_group_line(group) for group in status.groups.groups if group.lost or not group.serves]


def _group_line(group: admin_pb2.RankGroup) -> Text:
    if not group.serves:
        why = one_line(group.away_because)
        return Text(f"{one_line(group.id)}, {group.ranks} ranks, is away for {group.away_s:,.0f} s: {why}", style="red")
    times = f"has formed again {group.epoch - 1:,} times, last" if group.epoch > 2 else "has formed again"
    when = f" {group.lost_s:,.0f} s ago" if group.HasField("lost_s") else ""
    return Text(f"{one_line(group.id)}, {group.ranks} ranks, {times}{when}: {one_line(group.lost)}", style="yellow")


def ranks_of(status: admin_pb2.GetStatusResponse) -> dict[str, int]:
    """Returns the number of ranks of the runners that are groups, by id."""
    return {group.id: group.ranks for group in status.groups.groups}


def _groups(groups: admin_pb2.RankGroups) -> str:
    if not groups.formed_again:
        return ""
    count, pause = groups.formed_again, groups.pauses_s / groups.formed_again
    return f", groups of ranks formed again {count:,} time{'s' * (count != 1)} ({pause:,.1f} s pause each)"


def _runners(status: admin_pb2.GetStatusResponse) -> RenderableType:
    if not status.runners:
        return Text("no runner", style="red")
    table = Table(padding=(0, 0, 0, 1))  # fits 80 cells, as numbers and names are not cut but wrapped
    drafts = any(runner.drafter for runner in status.runners)
    numerics = any(runner.numerics for runner in status.runners)
    hosts = any(runner.host_blocks for runner in status.runners)
    roles = any(runner.role not in ("", "both") for runner in status.runners)
    ranks = ranks_of(status)
    extra = {"drafts": drafts, "numerics": numerics, "host blocks": hosts, "role": roles, "ranks": bool(ranks)}
    for heading in (*HEADINGS, *(heading for heading, shown in extra.items() if shown)):
        table.add_column(heading, overflow="fold")
    for runner in status.runners:
        table.add_row(
            runner.id,
            runner.device,
            runner.model,
            runner.decoder or "-",
            f"{runner.running} / {runner.slots}",
            f"{runner.free_blocks:,} / {runner.blocks:,}",
            str(runner.block_size),
            str(runner.plans_in_flight),
            f"{runner.last_plan:,}",
            *([f"{runner.drafter or 'none'}, {runner.max_drafts}, gain {runner.draft_gain:.2f}"] if drafts else []),
            *([runner.numerics[:8] or "any"] if numerics else []),
            *([f"{runner.host_used_blocks:,} / {runner.host_blocks:,}"] if hosts else []),
            *([runner.role] if roles else []),
            *([str(ranks.get(runner.id, 1))] if ranks else []),
        )
    return table
