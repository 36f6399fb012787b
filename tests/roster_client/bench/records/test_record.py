"""Every definition of the benchmarks' metrics, on handmade records."""

from __future__ import annotations

import dataclasses
import gzip
import math
from pathlib import Path

import pytest

from roster_client.bench.records.parquet_file import write_parquet
from roster_client.bench.records.record import LoopDelays, RequestRecord, Run, RunHeader, ServiceSample, Status
from roster_client.bench.records.record_file import RecordFileError, append_run, read_run, read_runs, write_run
from roster_client.bench.records.summary import Distribution, Targets, summarize
from scheduler_svc.simulator.report.report import jain_index


def request(number: int = 0, scheduled_s: float = 0.0, *times: float, **fields: object) -> RequestRecord:
    """Returns a request whose messages arrived at these times, of one token each without `message_tokens`."""
    tokens = tuple(fields.pop("message_tokens", (1,) * len(times)))  # type: ignore[call-overload]
    given = {"status": Status.OK, "wanted_tokens": sum(tokens), "output_tokens": sum(tokens), "prompt_tokens": 10}
    return RequestRecord(
        request_id=str(number),
        scheduled_s=scheduled_s,
        sent_s=fields.pop("sent_s", scheduled_s),  # type: ignore[arg-type]
        message_s=times,
        message_tokens=tokens,
        **given | fields,  # type: ignore[arg-type]
    )


def a_run(*requests: RequestRecord, samples: tuple[ServiceSample, ...] = (), loop: LoopDelays | None = None) -> Run:
    header = RunHeader("fcfs", "grpc://x", "m", "t", "all at once", "CPU", "roster bench", settings={"slots": 4})
    return Run(header, list(requests), list(samples), loop)


def test_times_of_a_request() -> None:
    one = request(0, 1.0, 1.5, 1.6, 1.9, sent_s=1.1)
    assert math.isclose(one.lag_s, 0.1)
    assert math.isclose(one.ttft_s, 0.5), "from the scheduled time, not from the late send"
    assert math.isclose(one.e2e_s, 0.9)
    assert one.tpot_s is not None and math.isclose(one.tpot_s, 0.2)
    assert one.gaps_s == pytest.approx([0.1, 0.3])
    assert one.itls_s == pytest.approx([0.1, 0.3])


def test_a_pause_counts_once_a_token_of_the_message_after_it() -> None:
    one = request(0, 0.0, 1.0, 1.4, message_tokens=(2, 4))
    assert one.gaps_s == pytest.approx([0.4])
    assert one.itls_s == pytest.approx([0.1] * 4)
    assert one.tpot_s == pytest.approx(0.4 / 5), "over all output tokens but the first"


def test_one_token_has_no_tpot() -> None:
    one = request(0, 0.0, 1.0)
    assert one.tpot_s is None
    assert one.itls_s == []
    assert Targets(ttft_s=1.0, itl_s=0.0).kept(one)


def test_percentiles_interpolate() -> None:
    values = Distribution.of([float(value) for value in range(1, 101)])
    assert values == Distribution(100, 50.5, 50.5, pytest.approx(90.1), pytest.approx(99.01), 100.0)  # type: ignore[arg-type]
    assert Distribution.of([]) is None


def test_rates_count_from_the_first_scheduled_time_to_the_last_token() -> None:
    summary = summarize(a_run(request(0, 2.0, 3.0, 4.0), request(1, 3.0, 5.0, 6.0, 12.0)))
    assert summary.seconds == 10.0
    assert summary.requests_per_s == pytest.approx(0.2)
    assert summary.output_tokens_per_s == pytest.approx(0.5)
    assert summary.total_tokens_per_s == pytest.approx(2.5)
    assert summary.ttft is not None and summary.ttft.mean == pytest.approx(1.5)
    assert summary.e2e is not None and summary.e2e.max == pytest.approx(9.0)


def test_goodput_wants_both_targets_and_counts_failures_as_bad() -> None:
    targets = Targets(ttft_s=1.0, itl_s=0.5)
    run = a_run(
        request(0, 0.0, 1.0, 1.5),  # good, both on the edge
        request(1, 0.0, 1.1, 1.2),  # late
        request(2, 0.0, 0.5, 2.0),  # slow
        request(3, 0.0, status=Status.REFUSED),
        request(4, 0.0, 3.0, 4.0, ttft_target_s=3.0, itl_target_s=1.0),  # good by its own targets
        request(5, 0.0, 0.1, 0.2, ttft_target_s=0.05),  # not by its own
    )
    summary = summarize(run, targets)
    assert (summary.good, summary.good_share) == (2, pytest.approx(2 / 6))
    assert summary.goodput == pytest.approx(2 / 4.0)


def test_errors_are_counted_and_excluded_from_latencies() -> None:
    run = a_run(
        request(0, 0.0, 1.0, 2.0, wanted_tokens=5),
        request(1, 0.0, status=Status.REFUSED, error="the queue is full"),
        request(2, 0.0, 0.1, 9.0, status=Status.FAILED),
        request(3, 0.0, status=Status.TIMEOUT),
    )
    summary = summarize(run)
    assert summary.ok == 1
    assert summary.errors == {"refused": 1, "failed": 1, "timeout": 1}
    assert summary.ended_early == 1
    assert summary.ttft is not None and summary.ttft.count == 1
    assert summary.output_tokens == 2
    assert summary.seconds == 9.0, "the time of a failed request is part of the run"


def test_a_run_without_a_token_has_no_latencies() -> None:
    summary = summarize(a_run(request(0, 0.0, status=Status.FAILED)))
    assert summary.ttft is summary.itl is summary.e2e is None
    assert summary.goodput == 0
    with pytest.raises(ValueError, match="no requests"):
        summarize(a_run())


def test_fairness_is_jains_index_over_tenants() -> None:
    assert jain_index([1, 1, 1, 1]) == 1
    assert jain_index([1, 0, 0, 0]) == 0.25
    assert jain_index([0, 0]) == 1
    fast = request(0, 0.0, 0.5, 1.0, tenant="a")  # 2 tokens/s
    slow = request(1, 0.0, 1.0, 2.0, tenant="b")  # 1 token/s
    assert summarize(a_run(fast, slow)).fairness == pytest.approx(9 / 10)
    starved = request(2, 0.0, status=Status.REFUSED, tenant="b")
    assert summarize(a_run(fast, starved)).fairness == pytest.approx(0.5), "a tenant without tokens counts"


def test_batch_fill_is_of_the_time_in_which_requests_arrive() -> None:
    samples = tuple(ServiceSample(time, running, 4) for time, running in ((0.0, 2), (1.0, 4), (2.0, 3), (9.0, 0)))
    run = a_run(request(0, 0.0, 1.0), request(1, 2.0, 10.0), samples=samples)
    assert summarize(run).batch_fill == pytest.approx(0.75)
    assert summarize(a_run(request(0, 0.0, 1.0))).batch_fill is None


@pytest.mark.parametrize(
    ("lag_s", "loop_p99_s", "cpu_share", "said"),
    [
        (0.0, 0.001, 0.3, ""),
        (0.2, 0.001, 0.3, "requests were sent 200.0 ms late"),
        (0.0, 0.060, 0.3, "event loop was 60.0 ms late"),
        (0.0, 0.001, 0.97, "a core 97% busy"),
    ],
)
def test_a_slow_client_is_reported(lag_s: float, loop_p99_s: float, cpu_share: float, said: str) -> None:
    loop = LoopDelays(0.01, 100, 0.0, loop_p99_s, loop_p99_s, cpu_share)
    summary = summarize(a_run(request(0, 0.0, 1.0, 1.1, 1.2, sent_s=lag_s), loop=loop))
    assert said in summary.client.bottleneck
    assert bool(said) == bool(summary.client.bottleneck)


@pytest.mark.parametrize("name", ["run.jsonl", "folder/run.jsonl.gz"])
def test_a_run_survives_its_file(tmp_path: Path, name: str) -> None:
    run = a_run(
        request(0, 0.5, 1.0, 1.25, tenant="a", cached_tokens=0, ttft_target_s=0.3, sent_s=0.5000004),
        request(1, 0.5, status=Status.REFUSED, error="the queue is full"),
        samples=(ServiceSample(0.25, 1, 4, waiting=2),),
        loop=LoopDelays(0.01, 7, 0.0, 0.001, 0.002, 0.1),
    )
    write_run(tmp_path / name, run)
    again = read_run(tmp_path / name)
    assert again.header == run.header
    assert again.samples == run.samples
    assert again.loop_delays == run.loop_delays
    assert again.requests[1] == run.requests[1]
    assert again.requests[0].sent_s == 0.5, "microseconds"
    assert again.requests[0].cached_tokens == 0, "reported as 0, which differs from not reported"
    assert again.requests[0].message_s == run.requests[0].message_s


@pytest.mark.parametrize("name", ["runs.jsonl", "runs.jsonl.gz"])
def test_a_file_may_hold_several_runs(tmp_path: Path, name: str) -> None:
    path = tmp_path / "folder" / name
    some = [a_run(request(number, 0.0, 1.0 + number), request(9, 0.5, 0.75)) for number in range(3)]
    for run in some:
        append_run(path, run)
    assert [run.requests for run in read_runs(path)] == [run.requests for run in some]
    with pytest.raises(RecordFileError, match="has 3 runs"):
        read_run(path)


def test_a_run_survives_parquet_and_others_can_read_it(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    run = a_run(
        request(0, 0.5, 1.0, 1.25, tenant="a", cached_tokens=0, ttft_target_s=0.3, sent_s=0.5000004),
        request(1, 0.5, status=Status.REFUSED, error="the queue is full"),
        samples=(ServiceSample(0.25, 1, 4, waiting=2),),
        loop=LoopDelays(0.01, 7, 0.0, 0.001, 0.002, 0.1),
    )
    path = tmp_path / "folder" / "run.parquet"
    write_parquet(path, run)
    assert read_run(path) == run
    columns = pq.read_table(path).to_pydict()
    assert columns["status"] == ["ok", "refused"] and columns["cached_tokens"] == [0, None]
    assert columns["message_s"] == [[1.0, 1.25], []] and list(columns) == [
        one.name for one in dataclasses.fields(RequestRecord)
    ]
    pq.write_table(pq.read_table(path).replace_schema_metadata({}), path)
    with pytest.raises(RecordFileError, match="is not a Parquet file"):
        read_run(path)


def test_invalid_runs_are_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for text, said in (
        ("", "empty"),
        ('{"request": {}}\n', "line 1.*not 'run'"),
        ("arrival_s,prompt_tokens\n", "line 1"),
        ('{"run": {"system": "x"}}\n', "line 1.*missing"),
    ):
        path.write_text(text)
        with pytest.raises(RecordFileError, match=said):
            read_run(path)
    write_run(path, a_run(request(0, 0.0, 1.0)))
    path.write_text(path.read_text() + '{"request": {"request_id": "1"}}\n')
    with pytest.raises(RecordFileError, match="line 3"):
        read_run(path)
    with gzip.open(tmp_path / "x.gz", "wt") as file:
        file.write("no json\n")
    with pytest.raises(RecordFileError, match="line 1"):
        read_run(tmp_path / "x.gz")


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_a_truncated_file_is_refused_at_any_cut(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_run(path, a_run(request(0, 0.0, 1.0, error="é"), request(1, 0.5, 0.75)))
    whole = path.read_bytes()
    refused = 0
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        try:
            read_run(path)
        except RecordFileError:
            refused += 1
    # Cut between two lines, the file is a run with fewer requests.
    assert refused >= len(whole) - 6
