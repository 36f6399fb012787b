"""Converts the engine's status into a gateway's load report. All runners together are one rank."""

from __future__ import annotations

from datetime import UTC, datetime

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from roster_protos import admin_pb2


class LoadReporter:
    """Makes load reports. The throughput in a report is the mean since the previous report."""

    def __init__(self) -> None:
        self._uptime_s = 0.0
        self._sampled_tokens = 0

    def report(self, status: admin_pb2.GetStatusResponse) -> vllm.GetLoadsResponse:
        """Returns the load at the time of `status`."""
        runners = status.runners
        running = sum(runner.running for runner in runners)
        slots = sum(runner.slots for runner in runners)
        held = sum((runner.blocks - runner.free_blocks) * runner.block_size for runner in runners)
        room = sum(runner.blocks * runner.block_size for runner in runners)
        prompt = status.totals.cached_tokens + status.totals.prefill_tokens
        load = vllm.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=status.waiting,
            num_total_reqs=running + status.waiting,
            num_used_tokens=held,
            max_total_num_tokens=room,
            token_usage=held / room if room else 0.0,
            gen_throughput=self._throughput(status),
            cache_hit_rate=status.totals.cached_tokens / prompt if prompt else 0.0,
            utilization=running / slots if slots else 0.0,
            max_running_requests=slots,
            num_waiting_uncached_tokens=min(status.waiting_tokens, 2**31 - 1),
        )
        now = datetime.now(UTC).isoformat()
        return vllm.GetLoadsResponse(timestamp=now, version=status.version, dp_rank_count=1, loads=[load])

    def _throughput(self, status: admin_pb2.GetStatusResponse) -> float:
        """Returns the sampled tokens per second since the last call."""
        seconds = status.uptime_s - self._uptime_s
        tokens = status.totals.sampled_tokens - self._sampled_tokens
        self._uptime_s, self._sampled_tokens = status.uptime_s, status.totals.sampled_tokens
        return max(0.0, tokens / seconds) if seconds > 0 else 0.0
