"""Comparison with a peer: its loads and plan, its site, resuming, a peer that dies, Ctrl-C, and its tables."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import sys
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu_comparison.__main__ import main
from bench.gpu_comparison.peers import measure, servers, site
from bench.gpu_comparison.peers.command import compare
from bench.gpu_comparison.peers.numbers import bench_steps_numbers, decode_numbers, padded_numbers, step_ms
from bench.gpu_comparison.peers.options import parse_options
from bench.gpu_comparison.peers.parts import DECODE_ROWS, SHAPE_LOADS, Part, parse_parts, stages
from bench.gpu_comparison.peers.records import PeerRecord, read_records
from bench.gpu_comparison.peers.site import Unusable, found_site, unpacked_site
from bench.gpu_comparison.peers.tables import markdown
from bench.gpu_comparison.peers.workloads import Recipe, workload
from bench.steps.times import StepTimes, references
from roster_client.bench.records.record import RequestRecord, Status
from tests.support.fake_vllm_site import VERSION, write_site
from tests.support.process_state import gone
from tests.support.thoroughness import FULL, choice

SMALL = ("--peer=vllm", "--shape=qwen3-0.6b", "--device=hash", f"--client-processes={1 + FULL}", "--requests=8")
SHORT = ("--prompt-divisor=16", "--output-divisor=16")


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site, with few rows to decode, and without the tokenizers of real shapes."""
    monkeypatch.setattr(site, "WORK", tmp_path)
    monkeypatch.setattr(servers, "model_folder", lambda *_, **__: tmp_path / "model")
    monkeypatch.setitem(DECODE_ROWS, "decode", (1, 3) if FULL else (3,))
    return write_site(tmp_path / "site")


def engine_is_gone(site_folder: Path) -> bool:
    pid = int((site_folder / "engine").read_text())
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s:
        if gone(pid):
            return True
        time.sleep(0.02)
    return False


async def nothing(*_: object) -> None:
    """Stands for the warm-up, whose processes take a second of CPU time."""


def arguments(peer: Path, out: Path, *loads: str) -> list[str]:
    return [*SMALL, *SHORT, f"--peer-site={peer}", f"--out={out}", "--loads", *loads]


def test_loads() -> None:
    assert parse_parts("vllm=decode,8:160") == [Part("vllm", "decode"), Part("vllm", "8:160")]
    (padded,) = parse_parts("transformers=padded")
    assert (padded.kind, padded.rows, padded.count) == ("padded", 32, 96)
    for wrong in ("orca=8:1", "vllm", "vllm=", "vllm=8", "vllm=0:5", "vllm=8:0", "vllm=fast:3", "vllm=8:1:2"):
        with pytest.raises(ValueError, match=r"is no list of loads|is no load"):
            parse_parts(wrong)
    for wrong in ("vllm-1024=decode", "vllm=padded", "roster-tuned=decode-wide", "transformers=at-once"):
        with pytest.raises(ValueError, match="has no load"):
            parse_parts(wrong)
    parts = [part for text in SHAPE_LOADS["llama-3.1-8b"] for part in parse_parts(text)]
    assert [(stage.system, len(stage.parts)) for stage in stages(parts)] == [
        ("roster", 1), ("roster", 4), ("vllm", 5), ("vllm-1024", 3),
    ]  # fmt: skip


def test_the_plan_fits_into_a_holding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for shape, seconds, calls in (("llama-3.1-8b", 720, 2), ("qwen3-0.6b", 540, 1), ("qwen3-30b-a3b", 540, 1)):
        assert compare(["--peer=vllm", f"--shape={shape}", f"--out={tmp_path}", "--dry-run"]) == 0
        total, _, _, of, *_ = (last := capsys.readouterr().out.splitlines()[-1]).split()
        assert int(total) < seconds and f"in {calls} calls" in last and of == str(calls)


def test_every_system_gets_the_same_conversations() -> None:
    made = workload(Recipe(Part("roster", "at-once"), 5000, 512, 0))
    assert sum(one.prompt_tokens for one in made.requests) == 733_177
    assert sum(one.output_tokens for one in made.requests) == 73_760
    slow, same, fast = (
        workload(Recipe(Part(system, load), 5000, 512, 0, 64, 64), 0, prefix)
        for system, load, prefix in (("roster", "8:5", "a-"), ("vllm", "8:5", "b-"), ("vllm", "9:5", "c-"))
    )
    for one, other, third in zip(slow.requests, same.requests, fast.requests, strict=True):
        assert one.scheduled_s == other.scheduled_s and one.request_id != other.request_id
        assert one.prompt.tolist() == other.prompt.tolist() != third.prompt.tolist()  # type: ignore[union-attr]
    others, observed = workload(Recipe(Part("vllm", "decode"), 5000, 512, 0), 64).requests
    assert others.prompt.shape == (63, 512) and observed.prompt.shape == (512,)  # type: ignore[union-attr]
    assert others.output_tokens > observed.output_tokens + 64 * 512 / 8192, "all rows run to the observed one's end"
    assert observed.scheduled_s > others.scheduled_s == 0.0


def test_without_a_site(peer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare([*SMALL, f"--out={tmp_path}", "--loads", "vllm=8:5"]) == 2
    assert capsys.readouterr().err.startswith("--peer vllm needs --peer-site DIR: a folder with vLLM, or with its ")
    (tmp_path / "empty").mkdir()
    assert compare(arguments(tmp_path / "empty", tmp_path / "out", "vllm=8:5")) == 2
    assert "has neither a package vllm nor an archive vllm_site.tar.xz.*" in capsys.readouterr().err


def test_an_archive_in_pieces_is_unpacked_once(peer: Path, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        archive.add(peer, ".")
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    half = len(packed.getvalue()) // 2
    (pieces / "vllm_site.tar.xz.00").write_bytes(packed.getvalue()[:half])
    with pytest.raises(Unusable, match=r"vllm_site.tar.xz.00 can't be unpacked .*: prepare it again"):
        unpacked_site(found_site(pieces))
    assert not list(tmp_path.glob("partial-*"))
    (pieces / "vllm_site.tar.xz.01").write_bytes(packed.getvalue()[half:])
    folder = unpacked_site(found_site(pieces))
    assert site.version(folder) == VERSION
    (folder / "kept").touch()
    assert (unpacked_site(found_site(pieces)) / "kept").exists()


def test_a_call_measures_what_has_no_record(
    peer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not FULL:
        monkeypatch.setattr(measure, "warm_up", nothing)
    loads = ["roster=20:6", "vllm=decode,at-once", *(["vllm-1024=20:6"] if FULL else [])]
    first, both = arguments(peer, tmp_path / "out", loads[0]), arguments(peer, tmp_path / "out", *loads)
    assert compare(first) == 0, capsys.readouterr()
    assert compare(both) == 0, capsys.readouterr()
    records = read_records(tmp_path / "out" / "peer.jsonl")
    made = [("roster", "20:6"), ("vllm", "decode"), ("vllm", "at-once"), ("vllm-1024", "20:6")]
    assert [(one.system, one.load) for one in records] == made[: len(records)] and len(records) >= 3
    for one in records:
        assert one.card_id and one.commit and one.date and one.start_s > 0
        assert one.version == (VERSION if one.system.startswith("vllm") else "0.1.0") or one.system == "roster"
    served, steps, at_once = records[:3]
    assert served.settings["flags"] == {} and served.facts["policy"], "defaults, and what is in force is noted"
    assert served.numbers["requests"] == 6 and served.numbers["cached_tokens"] == 0
    assert served.numbers["tokens_per_message"] >= 1 and served.numbers["ttft_ms"]["p90"] > 0
    # The fake server takes at least 2 ms a token, but a busy machine may deliver several at once.
    assert 0 < steps.numbers["step_ms"]["3"] < 500
    assert at_once.numbers["requests"] == 8 and at_once.numbers["itl_ms"] == {}, "answers that came whole"
    folder, *command = json.loads((peer / "calls").read_text().splitlines()[0])
    assert folder == str(tmp_path) and command[0] == "serve" and "--load-format=dummy" in command
    assert engine_is_gone(peer)
    calls = (peer / "calls").read_text()
    assert compare(both) == 0 and (peer / "calls").read_text() == calls, "all parts have a record"
    assert "| 8 | vLLM, default |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["gpu_comparison", "--table", str(tmp_path / "out" / "peer.jsonl")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0 and "| 20 / s | Roster, default |" in capsys.readouterr().out


def test_a_part_that_does_not_fit_waits_for_another_call(
    peer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare([*arguments(peer, tmp_path / "out", "vllm=8:160,decode"), "--budget=100"]) == 0
    assert "left for another call: vllm, 8:160; vllm, decode: 134 s are needed, 90 s" in capsys.readouterr().out
    assert not (peer / "calls").exists()


def test_a_peer_that_dies_is_quoted(
    peer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "dies")
    assert compare(arguments(peer, tmp_path / "out", "vllm-1024=8:5")) == 1
    assert "vllm-1024: vllm-1024 ended with status 1: ValueError: Free memory on" in capsys.readouterr().out
    assert engine_is_gone(peer) and not (tmp_path / "out" / "peer.jsonl").exists()


@pytest.mark.parametrize("number", choice([signal.SIGINT, signal.SIGTERM], in_ci=[signal.SIGINT]))
def test_nothing_runs_after_ctrl_c(
    peer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "waits")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

    def press() -> None:
        while not (peer / "engine").exists() or not (peer / "engine").read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    pressing = threading.Thread(target=press, daemon=True)
    pressing.start()
    assert compare(arguments(peer, tmp_path / "out", "vllm=8:5")) == 130
    pressing.join()
    assert "has 0 records, and the same command continues" in capsys.readouterr().err
    assert engine_is_gone(peer)


def test_the_budget_ends_a_start_that_hangs(
    peer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "waits")
    monkeypatch.setattr("bench.gpu_comparison.peers.call.start_s", lambda *_: 0.0)
    monkeypatch.setattr("bench.gpu_comparison.peers.call.load_s", lambda *_: 0.0)
    assert compare([*arguments(peer, tmp_path / "out", "vllm=8:5"), "--budget=11.5"]) == 0
    assert "the budget is spent" in capsys.readouterr().out and engine_is_gone(peer)


def test_steps_of_the_observed_row() -> None:
    times, counts = (0.0, 0.01, 0.02, 0.06, 0.07), (1, 1, 1, 4, 1)
    one = RequestRecord("1", 0.0, 0.0, Status.OK, 8, 4, 8, times, counts)
    assert step_ms(one, 2, 8) == pytest.approx(10.0) and step_ms(one, 2, 3) == pytest.approx(10.0)
    with pytest.raises(ValueError, match="came in one message"):
        step_ms(one, 4, 6)
    observed = replace(one, request_id="x-observed")
    assert decode_numbers([observed, replace(one, message_s=(1.0,))], 2, 8)["second_half_ms"] == pytest.approx(10.0)
    with pytest.raises(ValueError, match="ended before the observed one"):
        decode_numbers([observed, replace(one, message_s=(0.01,))], 2, 8)
    rows = [{"batch": 8, "step": 1.5, "floor": 1.2, "bucket": 8, "way": "own"}]
    assert bench_steps_numbers({"rows": rows})["step_ms"] == {"8": 1.5}
    assert padded_numbers([one])["tokens_per_s"] == pytest.approx(8 / 0.07)
    with pytest.raises(ValueError, match="1 of 1 requests failed: gone"):
        padded_numbers([replace(one, status=Status.FAILED, error="gone")])


def test_the_runner_and_transformers_are_measured_by_their_own_processes(
    peer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = tmp_path / "fake_steps.py"
    rows = [{"batch": 3, "step": 4.25, "floor": 4.0, "bucket": 4, "way": "own"}]
    fake.write_text(
        "import pathlib, sys\nif '64' in sys.argv: sys.exit('no memory')\n"
        f"pathlib.Path(sys.argv[-1].partition('=')[2]).write_text({json.dumps({'rows': rows})!r})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(measure, "STEPS", "fake_steps")
    monkeypatch.setattr("roster_client.bench.runs.provenance.gpu_card", lambda: "a card")
    options = ["--peer=vllm", "--shape=qwen3-0.6b", f"--out={tmp_path / 'out'}", "--loads", "roster=decode,decode-wide"]
    monkeypatch.setitem(DECODE_ROWS, "decode-wide", (64,))
    assert compare(options) == 1
    said = capsys.readouterr().out
    assert "roster, decode-wide: python -m fake_steps ended with status 1: no memory" in said
    assert "| Roster, default | 4.25 |" in said
    with pytest.raises(SystemExit):
        parse_options([*options, "--device=hash"])


def test_large_batches_have_no_references() -> None:
    times = StepTimes("qwen3-0.6b", "runner", 1024, 1024, "cuBLAS", 9.0, 7.0, 8.0, 1.0, 2.0, 8.9, 0.1, 1e5)
    assert all(math.isnan(value) for value in references(times))
    assert references(replace(times, batch=8)) == (1.85, 1.3, 1.44)


def test_tables_of_two_cards() -> None:
    numbers = {
        "requests": 512, "seconds": 22.5, "tokens_per_s": 3278.2, "cached_tokens": 0,
        "ttft_ms": {"p50": 42.04, "p90": 120.2, "p99": 280.6}, "itl_ms": {"p50": 5.24, "p99": 29.31},
        "e2e_ms": {"p50": 1030.0}, "client_late_ms": {"p99": 1.2},
    }  # fmt: skip
    one = PeerRecord(
        "GPU-1", "NVIDIA H200", "llama-3.1-8b", "roster", "14:280", {}, "0123456789abcdef", "0.1.0",
        "2026-11-29T20:00:00+00:00", "c", 50.0, numbers,
    )  # fmt: skip
    older = replace(one, numbers={**numbers, "seconds": 99.0})
    steps = {"step_ms": {"512": 21.456, "1024": 40.0}}
    records = [older, one, replace(one, system="vllm", load="decode-wide", version="0.25.0", numbers=steps)]
    records += [replace(one, card_id="GPU-2", system="vllm", load="at-once")]
    text = markdown(records)
    assert "| 14 / s | Roster, default | 42.0 / 120 / 281 ms | 5.2 / 29.3 ms | 1.03 s | 3,278 |" in text
    assert text.count("14 / s") == 1 and "roster 0.1.0, vllm 0.25.0; commit 0123456" in text
    assert "| decode, ms per step, rows | 512 | 1,024 |\n|---|---|---|\n| vLLM, default | 21.46 | 40.00 |" in text
    assert "(GPU-2)" in text and "| 512 | vLLM, default | 22.50 s | 3,278 | 1.03 s |" in text


def test_both_servers_quantize_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--peer=vllm", "--shape=llama-3.1-8b", f"--out={tmp_path}", "--quantization=fp8"]
    options = parse_options([*given, "--kv-cache-dtype=fp8_e4m3"])
    assert servers.flags_of(options, "vllm")["serve"][-2:] == ["--quantization=fp8", "--kv-cache-dtype=fp8"]
    with pytest.raises(SystemExit):
        parse_options([*given, "--quantize-head"])
    assert "leave its loads out" in capsys.readouterr().err
    assert parse_options([*given, "--quantize-head", "--loads=roster=decode"]).quantize_head
