"""A frame of `roster top` for rich: headline, gauges, a bar for each running sequence, keys."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from roster_client.terminal.status_view import group_lines, held_back_line, ranks_of
from roster_client.terminal.text import one_line
from roster_client.top.load import Load, is_prefill
from roster_protos import admin_pb2

BAR_CELLS = 24
GAUGE_CELLS = 8
NAME_CELLS = 32
TENANTS_SHOWN = 4
FIXED_LINES = 13
"""Lines of a frame besides runners and sequences."""
LINES_BESIDE_MENU = 9
"""Lines of a frame that has a menu in place of the sequences, besides runners and the menu's policies."""
_COLOURS = ("green", "blue", "magenta", "yellow", "cyan", "red")


MENU_KEYS = "123456789abcdefghijklmnorstuvwxyz"
"""Keys that select a policy; without p and q, which have other uses."""


@dataclass(slots=True)
class Menu:
    """The policies to choose from, when they are shown."""

    policies: list[admin_pb2.PolicyDescription]

    def selected(self, key: str) -> str | None:
        """Returns the name of the policy that the key selects, None if it selects none."""
        number = MENU_KEYS.find(key.lower()) if key else -1
        return self.policies[number].name if 0 <= number < len(self.policies) else None


def frame(load: Load, height: int, menu: Menu | None = None, notice: str = "", keys: bool = True) -> RenderableType:
    """Returns the whole frame, of at most `height` lines. `notice`: the last key's result, or an error."""
    status = load.now.status
    troubles = [*group_lines(status), *map(held_back_line, status.held_back)]
    more = bool(_tiers(load)) + len(status.runners) + len(troubles)
    lines = FIXED_LINES + more + (len(menu.policies) + 2 if menu else 0)
    parts: list[RenderableType] = [_headline(load), _numbers(load), _runners(status)]
    for line in troubles:
        line.no_wrap, line.overflow = True, "ellipsis"
        parts.append(line)
    if menu is None or lines < height:
        parts.append(_sequences(load, max(1, height - lines)))
    if menu is not None:
        room = height - LINES_BESIDE_MENU - more
        parts.append(_menu(menu, load.now.status.policy, max(1, room)))
    if notice:
        parts.append(Text(one_line(notice), style="yellow", no_wrap=True, overflow="ellipsis"))
    if keys:
        parts.append(
            Text("1 to 9, a to z: select policy   p: back   q: quit" if menu else "p: policies   q: quit", "dim")
        )
    return Group(*parts)


def _headline(load: Load) -> RenderableType:
    status = load.now.status
    line = Text.assemble(
        (f"roster {status.version}", "bold"),
        f"   up {_duration(status.uptime_s)}   policy ",
        (one_line(status.policy), "bold green"),
        (f" {one_line(status.policy_parameters)}", "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )
    if status.draining:
        line.append("   DRAINING", "bold red")
    return line


def _numbers(load: Load) -> RenderableType:
    status, totals = load.now.status, load.now.status.totals
    table = Table.grid(padding=(0, 2))
    for _ in range(3):  # fits 80 cells
        table.add_column(no_wrap=True)
    table.add_row(
        Text.assemble(("decode ", "dim"), f"{load.sampled_per_s:,.0f} tokens/s"),
        Text.assemble(("TTFT ", "dim"), f"p50 {_ms(load.ttft.p50_s)}  p99 {_ms(load.ttft.p99_s)}"),
        Text.assemble(("requests ", "dim"), f"{totals.requests:,}, {totals.refused:,} refused"),
    )
    table.add_row(
        Text.assemble(("prefill ", "dim"), f"{load.prefill_per_s:,.0f} tokens/s"),
        Text.assemble(("ITL ", "dim"), f"p50 {_ms(load.itl.p50_s)}  p99 {_ms(load.itl.p99_s)}"),
        Text.assemble(("preemptions ", "dim"), f"{totals.preemptions:,}"),
    )
    table.add_row(
        Text.assemble(("runners busy ", "dim"), f"{load.busy_share:.0%}"),
        Text.assemble(("rates over the last ", "dim"), f"{load.window_s:.0f} s"),
        _drafts(load),
    )
    if tiers := _tiers(load):
        table.add_row(*tiers)
    queue = Text.assemble(("waiting ", "dim"), (f"{status.waiting:,}", "bold"), no_wrap=True, overflow="ellipsis")
    queue.append(f" ({status.waiting_tokens:,} prompt tokens)", "dim")
    shown = list(load.now.waiting)[:TENANTS_SHOWN]
    for tenant in shown:
        queue.append(f"   {one_line(tenant.tenant) or 'no tenant'} {tenant.waiting:,}")
    return Group(table, queue)


def _tiers(load: Load) -> list[Text]:
    """Returns what host pools and moves between runners do; nothing where there are none."""
    status, parts = load.now.status, list[Text]()
    tier, moves = status.totals.host_tier, status.moves
    if any(runner.host_blocks for runner in status.runners):
        parts.append(Text.assemble(("loaded ", "dim"), f"{load.loaded_per_s:,.0f} tokens/s"))
        evicted = f"{tier.demoted_blocks:,} demoted, {tier.dropped_blocks:,} dropped"
        parts.append(Text.assemble(("blocks ", "dim"), evicted))
    if moves.sequences or moves.under_way:
        parts.append(Text.assemble(("moved ", "dim"), f"{moves.sequences:,}, {moves.under_way:,} under way"))
    return parts


def _drafts(load: Load) -> Text:
    """Returns the share of accepted drafts and the tokens per row; nothing without a drafter."""
    if not any(runner.drafter for runner in load.now.status.runners):
        return Text()
    share = "–" if load.accepted_share is None else f"{load.accepted_share:.0%}"
    return Text.assemble(("drafts ", "dim"), f"{share}, {load.tokens_per_row:.2f} a row")


def _runners(status: admin_pb2.GetStatusResponse) -> RenderableType:
    if not status.runners:
        return Text("no runner", style="red")
    table = Table.grid(padding=(0, 2))
    for gives_way in (False, True, False, False, False):  # as in the menu: the model's name
        table.add_column(no_wrap=not gives_way)
    ranks = ranks_of(status)
    for runner in status.runners:
        used = runner.blocks - runner.free_blocks
        times = f" ×{ranks[runner.id]}" if runner.id in ranks else ""
        table.add_row(
            Text.assemble((f"{one_line(runner.id)[:16]} ", "bold"), (runner.device + times, "dim")),
            Text(one_line(runner.model)[:24], no_wrap=True, overflow="ellipsis"),
            Text.assemble(("slots ", "dim"), _gauge(runner.running, runner.slots), f" {runner.running}/{runner.slots}"),
            Text.assemble(("KV ", "dim"), _gauge(used, runner.blocks), f" {used / max(1, runner.blocks):.0%}"),
            Text.assemble(("prefixes ", "dim"), f"{runner.cached_blocks / max(1, runner.blocks):.0%}", _host(runner)),
        )
    return table


def _host(runner: admin_pb2.RunnerStatus) -> Text:
    """Returns how full the runner's host pool is; nothing if it has none."""
    if not runner.host_blocks:
        return Text("")
    return Text.assemble(("  host ", "dim"), f"{runner.host_used_blocks / runner.host_blocks:.0%}")


def _sequences(load: Load, room: int) -> RenderableType:
    rows = sorted(load.now.running, key=lambda row: (row.runner, row.sequence.slot))
    running = sum(runner.running for runner in load.now.status.runners)
    several = len(load.now.status.runners) > 1
    table = Table.grid(padding=(0, 2))
    for _ in range(6):
        table.add_column(no_wrap=True)
    tenants = {tenant: index for index, tenant in enumerate(sorted({row.tenant for row in rows}))}
    shown = rows if len(rows) <= room else rows[: max(0, room - 1)]
    for row in shown:
        table.add_row(*_sequence(row, several, _COLOURS[tenants[row.tenant] % len(_COLOURS)]))
    lines: list[RenderableType] = [table] if shown else []
    if len(shown) < running:
        lines.append(Text(f"and {running - len(shown):,} more", style="dim"))
    if not running:
        lines.append(Text("no running sequences", style="dim"))
    return Panel(Group(*lines), title=f"{running:,} running", title_align="left", border_style="dim")


def _sequence(row: admin_pb2.RunningSequence, several: bool, colour: str) -> list[Text]:
    name = one_line(row.sequence.request_id)[:20] + (f"/{row.sequence.index}" if row.sequence.index else "")
    if is_prefill(row):
        goal = row.prompt_tokens + row.generated
        bar, progress = _bar(row.computed, goal, "▓", "yellow"), f"prefill {row.computed:,}/{goal:,}"
    else:
        bar, progress = _bar(row.generated, row.max_tokens, "█", colour), f"{row.generated:,}/{row.max_tokens:,}"
    return [
        Text((f"{one_line(row.runner)[:12]} " if several else "") + f"{row.sequence.slot:>3}", style="dim"),
        bar,
        Text(progress),
        Text(one_line(row.tenant)[:16] or "no tenant", style=colour),
        Text(name, style="dim"),
        Text(_duration(row.age_s) + _notes(row), style="dim"),
    ]


def _notes(row: admin_pb2.RunningSequence) -> str:
    drafts = f"  {row.accepted_tokens / row.drafted_tokens:.0%} of drafts" if row.drafted_tokens else ""
    return drafts + (f"  {row.preemptions}× preempted" if row.preemptions else "")


def _menu(menu: Menu, in_force: str, room: int) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    # Only a column that may wrap gives way in a narrow terminal; its texts are cut instead of wrapped.
    for gives_way in (False, False, True):
        table.add_column(no_wrap=not gives_way)
    for number, policy in enumerate(menu.policies[:room]):
        style = "bold green" if policy.name == in_force else "red" if policy.problem else ""
        what = one_line(f"can't be used: {policy.problem}" if policy.problem else policy.summary)
        name = Text(one_line(policy.name)[:NAME_CELLS], style)
        table.add_row(MENU_KEYS[number : number + 1], name, Text(what, no_wrap=True, overflow="ellipsis"))
    return Panel(table, title="policies", title_align="left")


def _bar(done: int, goal: int, mark: str, colour: str) -> Text:
    full = round(BAR_CELLS * min(1.0, done / max(1, goal)))
    return Text.assemble((mark * full, colour), ("·" * (BAR_CELLS - full), "dim"))


def _gauge(used: int, total: int) -> Text:
    share = used / max(1, total)
    full = round(GAUGE_CELLS * min(1.0, share))
    colour = "green" if share < 0.7 else "yellow" if share < 0.9 else "red"
    return Text.assemble(("█" * full, colour), ("░" * (GAUGE_CELLS - full), "dim"))


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return (
        f"{seconds * 1000:,.1f} ms"
        if seconds < 0.1
        else f"{seconds * 1000:,.0f} ms"
        if seconds < 10
        else (f"{seconds:,.0f} s")
    )


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    return f"{minutes} min" if hours < 1 else f"{hours} h {minutes % 60} min"
