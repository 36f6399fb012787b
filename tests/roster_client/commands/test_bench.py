"""`roster bench` against real processes with the hash model, at a small scale."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from roster_client.bench.records.record_file import read_run
from roster_client.cli import app
from tests.support.processes import RosterProcesses

COLUMNS = {"COLUMNS": "200", "TERMINAL_WIDTH": "200"}


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    folder = tmp_path_factory.mktemp("roster")
    with RosterProcesses(folder, scheduler={"prefix_sharing": True}, runner={"device": "hash"}) as processes:
        yield processes


def bench(*arguments: object) -> str:
    """Runs the command in this process and returns its output."""
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)], env=COLUMNS)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)], env=COLUMNS)
    assert result.exit_code == 2, result.output
    return result.output


def server(roster: RosterProcesses) -> tuple[str, ...]:
    return ("--server", roster.address, "--admin", roster.admin_address)


def trace_file(folder: Path, rows: int, *, hashes: bool = False) -> Path:
    lines = [
        f"{number * 0.02:.3f},{1000 + number},{5 + number % 7}" + (f",3 {number % 4}" if hashes else "")
        for number in range(rows)
    ]
    head = "arrival_s,prompt_tokens,output_tokens" + ",prefix_hash_ids" * hashes
    path = folder / "trace.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


def test_a_trace_is_replayed_and_reported(roster: RosterProcesses, tmp_path: Path) -> None:
    trace = trace_file(tmp_path, 40)
    out = tmp_path / "out"
    printed = bench(
        "serve", *server(roster), "--trace", trace, "-n", 24, "--prompt-divisor", 8, "--tenants", 3, "--out", out,
        "--timeout", 120,
    )  # fmt: skip
    assert "24 / 24" in printed and "auto" in printed
    run = read_run(out / "run.jsonl.gz")
    assert [len(run.requests), run.header.system, run.header.model] == [24, "auto", "hash"]
    assert sorted(request.scheduled_s for request in run.requests) == pytest.approx([n * 0.02 for n in range(24)])
    for request in run.requests:
        number = int(request.request_id.partition("-")[2])
        assert request.ok and request.prompt_tokens == -(-(1000 + number) // 8)
        assert request.output_tokens == request.wanted_tokens == sum(request.message_tokens) == 5 + number % 7
        assert request.cached_tokens == 0, "nothing is shared, and no earlier run's prompts are repeated"
    assert {request.tenant for request in run.requests} == {"tenant-0", "tenant-1", "tenant-2"}
    assert run.samples and run.header.settings["slots"] == run.samples[0].slots > 0
    assert run.header.rate == pytest.approx(50) and run.loop_delays is not None
    page = (out / "report.html").read_text("utf-8")
    assert page.count("<svg") == page.count("</svg>") == 2
    assert run.header.card.split(",")[0] in page and run.header.commit in page and "grpcio" in page
    assert not re.search(r"""(src|href)=["']?http""", page), "the page is self-contained"


def test_offline_sends_all_at_once_and_hash_ids_are_shared_prefixes(roster: RosterProcesses, tmp_path: Path) -> None:
    trace = trace_file(tmp_path, 12, hashes=True)
    options = ("-n", 12, "--prompt-divisor", 8, "--calls", "generate", "--name", "all")
    printed = bench("offline", *server(roster), "--trace", trace, *options, "--parquet", "--out", tmp_path / "out")
    assert "12 / 12" in printed
    records, again = tmp_path / "out" / "run.jsonl.gz", tmp_path / "again.html"
    run = read_run(records)
    assert [run.header.system, run.header.rate, run.header.arrivals] == ["all", None, "all at once"]
    assert {request.scheduled_s for request in run.requests} == {0.0}
    cached = [request.cached_tokens or 0 for request in run.requests]
    assert min(cached) == 0, "the very first request"
    assert sum(count >= 64 for count in cached) >= 8, "a block of 512 / 8 tokens, with which all of them begin"
    table = records.with_name("run.parquet")
    assert [request.request_id for request in read_run(table).requests] == [one.request_id for one in run.requests]
    bench("report", table, "-o", again, "--title", "A & B", "--ttft-target-ms", 1)
    page = again.read_text("utf-8")
    assert "A &amp; B" in page and "first token within 0.001 s" in page


def test_a_sweep_has_a_run_a_rate(roster: RosterProcesses, tmp_path: Path) -> None:
    lengths = ("--prompt", "uniform:4-40", "--output", "exponential:6")
    printed = bench("serve", *server(roster), *lengths, "--sweep", "40,80", "--seconds", 1, "--out", tmp_path)
    assert "auto, 40/s" in printed and "auto, 80/s" in printed
    assert [read_run(path).header.rate for path in sorted(tmp_path.glob("*.jsonl.gz"))] == [40, 80]
    assert (tmp_path / "report.html").read_text("utf-8").count("<svg") == 3


def test_wrong_options_are_reported_before_anything_is_sent(tmp_path: Path) -> None:
    trace = trace_file(tmp_path, 3)
    assert "either --trace, or" in refused("serve")
    assert "both --prompt and --output" in refused("offline", "--prompt", 5)
    openai = ("serve", "--openai", "http://127.0.0.1:1/v1", "--trace", trace, "--no-speculate")
    assert "--no-speculate needs a Roster server" in refused(*openai)
    assert "not a length distribution" in refused("offline", "--prompt", "x", "--output", 5)
    assert "pass --trace or --rate" in refused("serve", "--prompt", 5, "--output", 5)
    assert "omit --rate-scale" in refused("serve", "--trace", trace, "--sweep", "1", "--jitter", 3)
    assert "rates above 0" in refused("serve", "--trace", trace, "--sweep", "1,x")
    assert "give a rate, or" in refused("serve", "--trace", trace, "--rate", 1, "--jitter", 3)
    assert "`session` or `generate`" in refused("serve", "--trace", trace, "--calls", "x")
    assert "JSON object" in refused("serve", "--trace", trace, "--extra-body", "[]")
    assert "lacks arrival_s, prompt_tokens" in refused("serve", "--trace", __file__)
