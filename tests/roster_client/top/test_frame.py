"""Frames of `roster top`: they fit the terminal, distinguish prefill and decode, and contain no control characters."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from roster_client.terminal.status_view import status_view
from roster_client.top.frame import Menu, frame
from roster_client.top.load import as_json, load_between
from roster_protos import admin_pb2

PREFILL, DECODE = admin_pb2.ROW_KIND_PREFILL, admin_pb2.ROW_KIND_DECODE
POLICIES = [
    admin_pb2.PolicyDescription(name="fair", summary="Shares."),
    admin_pb2.PolicyDescription(name="fcfs", summary="In order."),
    admin_pb2.PolicyDescription(name="lost", problem="its package does not load"),
]
MANY = [admin_pb2.PolicyDescription(name=f"policy-{number}", summary="Many words. " * 20) for number in range(14)]


def row(slot: int, kind: admin_pb2.RowKind.ValueType, tenant: str = "acme", **fields: int) -> admin_pb2.RunningSequence:
    sequence = admin_pb2.SequenceRef(request_id=f"request-{slot}", slot=slot)
    return admin_pb2.RunningSequence(sequence=sequence, runner="r", tenant=tenant, kind=kind, **fields)


def look(rows: list[admin_pb2.RunningSequence], **status: object) -> admin_pb2.WatchRosterResponse:
    runner = admin_pb2.RunnerStatus(
        id="gpu-1", device="cuda:0", model="m", slots=64, running=len(rows), blocks=100, free_blocks=25
    )
    whole = admin_pb2.GetStatusResponse(policy="fcfs", version="1.2", runners=[runner], **status)  # type: ignore[arg-type]
    waiting = [admin_pb2.TenantQueue(tenant="beta", waiting=4)]
    return admin_pb2.WatchRosterResponse(time_s=5, status=whole, running=rows, waiting=waiting)


def drawn(now: admin_pb2.WatchRosterResponse, width: int, height: int, menu: Menu | None = None) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, color_system=None)
    console.print(frame(load_between(now, now), height, menu, "a notice"))
    return out.getvalue().rstrip("\n").split("\n")


def test_bars_show_the_progress_of_each_sequence() -> None:
    rows = [
        row(0, DECODE, generated=30, max_tokens=60),
        row(1, PREFILL, prompt_tokens=400, computed=100, max_tokens=9),
        row(2, PREFILL, prompt_tokens=50, generated=50, computed=50, preemptions=2),
    ]
    lines = drawn(look(rows, waiting=7), 120, 40)
    by_slot = {int(line.split()[1]): line for line in lines if "acme" in line}
    assert by_slot[0].count("█") == 12 and "30/60" in by_slot[0]
    assert by_slot[1].count("▓") == 6 and "prefill 100/400" in by_slot[1]
    assert by_slot[2].count("▓") == 12 and "prefill 50/100" in by_slot[2] and "2× preempted" in by_slot[2]
    text = "\n".join(lines)
    for words in ("policy fcfs", "waiting 7", "beta 4", "3/64", "75%", "p: policies", "a notice", "3 running"):
        assert words in text, text


def test_drafts_are_shown_where_there_is_a_drafter() -> None:
    now = look([row(0, DECODE, generated=1, max_tokens=9, drafted_tokens=8, accepted_tokens=6)])
    before = admin_pb2.WatchRosterResponse()
    before.CopyFrom(now)
    now.time_s, now.status.runners[0].drafter, now.status.runners[0].max_drafts = 9, "ngram", 7
    now.status.totals.MergeFrom(admin_pb2.Totals(drafted_tokens=40, accepted_tokens=10, decode_rows=20))
    out = io.StringIO()
    console = Console(file=out, width=80, color_system=None)
    console.print(frame(load_between(before, now), 24))
    console.print(status_view(now.status))
    text = " ".join(out.getvalue().split())
    for words in ("drafts 25%, 1.50 a row", "75% of drafts", "10 of 40 drafted tokens accepted", "drafts┃", "ngram"):
        assert words in text, text
    assert "drafts" not in "".join(drawn(before, 80, 24)[:6])


def test_host_pools_and_moves_have_a_line_where_there_are_any() -> None:
    plain = look([row(slot, DECODE, generated=1, max_tokens=9) for slot in range(30)])
    now, before = admin_pb2.WatchRosterResponse(), plain
    now.CopyFrom(plain)
    now.time_s, runner = 9, now.status.runners[0]
    runner.host_blocks, runner.host_used_blocks, runner.role, runner.conversations = 400, 100, "prefill", 3
    tier = admin_pb2.HostTier(loaded_tokens=8192, loaded_blocks=512, demoted_blocks=70, dropped_blocks=2)
    tier.prefetched_blocks, tier.unused_blocks = 64, 16
    now.status.totals.host_tier.CopyFrom(tier)
    by_use = {"drain": 4, "balance": 0}
    now.status.moves.CopyFrom(admin_pb2.Moves(sequences=4, pause_s=0.2, under_way=1, blocks=9, by_use=by_use))
    assert load_between(before, now).loaded_per_s == 2048
    out = io.StringIO()
    console = Console(file=out, width=80, color_system=None)
    console.print(frame(load_between(before, now), 24))
    assert len(out.getvalue().splitlines()) <= 24
    console.print(status_view(now.status))
    text = " ".join(out.getvalue().split())
    for words in (
        "loaded 2,048 tokens/s blocks 70 demoted, 2 dropped moved 4, 1 under way",
        "host 25%",
        "70 demoted, 2 dropped, 0 copied in vain, 16 of 64 loaded ahead for nothing",
        "4 sequences moved (4 drain, 50 ms pause each), 0 copies failed",
        "prefi┃",  # the role, in a narrow column
    ):
        assert words.removesuffix("┃") in text, text
    shown = as_json(load_between(before, now))
    assert shown["loaded_tokens_per_s"] == 2048 and shown["moved_sequences"] == 4
    assert shown["runners"][0]["role"] == "prefill" and shown["runners"][0]["conversations"] == 3
    out.truncate(0)
    console.print(status_view(plain.status))
    assert not any(word in out.getvalue() for word in ("moved", "host", "role", "loaded"))
    assert not any(word in " ".join(drawn(plain, 80, 24)) for word in ("moved", "demoted"))


def test_groups_of_ranks_have_a_line_if_they_are_away_or_have_lost_a_rank() -> None:
    now = look([row(slot, DECODE, generated=1, max_tokens=9) for slot in range(30)])
    runner_id = now.status.runners[0].id
    whole = admin_pb2.RankGroup(id=runner_id, ranks=4, epoch=1, serves=True)
    now.status.groups.groups.append(whole)
    plain = " ".join(drawn(now, 80, 24))
    assert "×4" in plain and "formed again" not in plain
    killed = "rank 1 (pid 7) was ended by signal 9"
    away = admin_pb2.RankGroup(id="b", ranks=2, epoch=1, away_s=7.4, away_because=f"it failed: {killed}")
    again = admin_pb2.RankGroup(id=runner_id, ranks=4, epoch=3, serves=True, lost=killed, lost_s=12.2)
    unknown = admin_pb2.RankGroup(id="c", ranks=2, epoch=2, serves=True, lost=killed)
    now.status.groups.CopyFrom(admin_pb2.RankGroups(groups=[again, away, unknown], formed_again=2, pauses_s=9.0))
    assert len(drawn(now, 80, 24)) <= 24
    out = io.StringIO()
    console = Console(file=out, width=160, color_system=None)
    console.print(status_view(now.status))
    text = " ".join(out.getvalue().split())
    for words in (
        f"{runner_id}, 4 ranks, has formed again 2 times, last 12 s ago: {killed}",
        f"b, 2 ranks, is away for 7 s: it failed: {killed}",
        f"c, 2 ranks, has formed again: {killed}",
        "groups of ranks formed again 2 times (4.5 s pause each)",
        "ranks┃",
    ):
        assert words in text, text
    shown = as_json(load_between(now, now))
    assert shown["groups"][0]["lost_s"] == 12.2 and shown["groups"][2]["lost_s"] is None
    assert shown["groups_formed_again"] == 2


@pytest.mark.parametrize(("width", "height"), [(140, 44), (80, 24), (70, 18)])
@pytest.mark.parametrize("menu", [None, Menu(POLICIES), Menu(MANY)])
def test_frames_fit_the_terminal(width: int, height: int, menu: Menu | None) -> None:
    rows = [row(slot, DECODE, f"tenant-{slot % 9}", generated=slot, max_tokens=64) for slot in range(64)]
    lines = drawn(look(rows, waiting=3, policy_parameters="{" + "x" * 300 + "}"), width, height, menu)
    assert len(lines) <= height and max(map(len, lines)) <= width
    assert menu is not None or any(
        line.strip("│ ").startswith("and ") and line.rstrip("│ ").endswith("more") for line in lines
    )


def test_80_cells_are_enough_for_every_number() -> None:
    """Also of `roster status`, where a long name continues on the next line."""
    now = look([], waiting=3, waiting_tokens=1_234)
    now.status.totals.requests, now.status.totals.refused = 12_345, 17
    now.status.runners[0].model, now.status.runners[0].decoder = "Llama-3.1-8B-Instruct", "transformers"
    lines = drawn(now, 80, 24)
    assert any("requests 12,345, 17 refused" in line for line in lines)
    shown = next(line for line in lines if "gpu-1 cuda:0" in line)
    assert "Llama-3.1" in shown and "0/64" in shown and "75%" in shown and "prefixes 0%" in shown
    assert "…" not in "".join(line for line in lines if line != shown)
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(status_view(now.status))
    assert "…" not in out.getvalue() and "decoder" in out.getvalue()


def test_the_menu_numbers_the_policies() -> None:
    text = "\n".join(drawn(look([]), 100, 30, Menu(POLICIES)))
    assert "no running sequences" in text and "1 to 9, a to z: select policy" in text
    assert [text.index(f"{number}  {name}") > 0 for number, name in enumerate(("fair", "fcfs", "lost"), 1)]
    assert "can't be used: its package does not load" in text


def test_more_than_nine_policies_have_keys_that_are_not_taken() -> None:
    menu = Menu(MANY)
    lines = drawn(look([]), 80, 24, menu)
    keys = [line.strip("│ ").split()[0] for line in lines if "policy-" in line]
    assert [line.split()[2] for line in lines if "Many" in line][:2] == ["policy-0", "policy-1"]
    assert keys[:11] == [*"123456789", "a", "b"] and "1 to 9, a to z" in lines[-1]
    assert [menu.selected(key) for key in keys] == [policy.name for policy in MANY[: len(keys)]]
    assert menu.selected("p") is None and menu.selected("q") is None and menu.selected("z") is None
    assert menu.selected("A") == "policy-9" and menu.selected("0") is None and menu.selected("") is None


def test_names_chosen_by_clients_move_no_cursor() -> None:
    rows = [row(0, DECODE, "\x1b[2Jevil\n\r", generated=1, max_tokens=2)]
    rows[0].sequence.request_id = "\x1b]0;title\x07"
    text = "\n".join(drawn(look(rows), 120, 30))
    assert "\x1b" not in text and "\x07" not in text and "\r" not in text and "evil" in text


def test_without_a_runner() -> None:
    now = admin_pb2.WatchRosterResponse(status=admin_pb2.GetStatusResponse(policy="fcfs", draining=True))
    text = "\n".join(drawn(now, 100, 30))
    assert "no runner" in text and "DRAINING" in text


def test_runners_in_quarantine_have_a_line_each() -> None:
    """In both views; the reason comes from a runner and may contain anything."""
    held_back = [
        admin_pb2.HeldBackRunner(
            id="gpu-2", losses=4, reason="a fault\n\x1b[2J" + "x" * 200, present=True, next_probe_s=1.5
        ),
        admin_pb2.HeldBackRunner(id="gpu-3", losses=9, reason="killed"),
        admin_pb2.HeldBackRunner(id="gpu-4", losses=2, reason="silent", present=True),
    ]
    now = look([row(slot, DECODE, generated=1, max_tokens=9) for slot in range(60)], held_back=held_back)
    lines = drawn(now, 100, 30)
    assert len(lines) <= 30 and max(map(len, lines)) <= 100
    shown = [line for line in lines if "held back" in line]
    assert [line.split()[0] for line in shown] == ["gpu-2", "gpu-3", "gpu-4"]
    assert "4 consecutive losses; next probe in 1.5 s; a fault" in shown[0] and "\x1b" not in shown[0]
    assert "not connected; killed" in shown[1] and "computing a probe; silent" in shown[2]
    out = io.StringIO()
    Console(file=out, width=300, color_system=None).print(status_view(now.status))
    assert "decoder" in out.getvalue()
    assert out.getvalue().count("is held back") == 3 and "\x1b" not in out.getvalue()
    assert [one["runner"] for one in as_json(load_between(now, now))["held_back"]] == ["gpu-2", "gpu-3", "gpu-4"]
