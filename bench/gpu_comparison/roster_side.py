"""Measures Roster's policies on one stack; the admin API swaps the policy while the runner keeps its weights."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence

from bench.gpu_comparison.budget import Budget
from bench.gpu_comparison.loads import SEED, Case, named, warm_up, workloads
from bench.gpu_comparison.options import GPU_SCHEDULER_FLAGS, records_file
from bench.gpu_comparison.table import line
from roster_client.bench.load.grpc_target import GrpcTarget
from roster_client.bench.load.workload import Workload
from roster_client.bench.records.record import Run
from roster_client.bench.records.record_file import append_run
from roster_client.bench.runs import provenance
from roster_client.bench.runs.measurement import SystemUnderLoad, measure
from roster_client.bench.runs.service_watch import service_settings
from roster_client.client.admin import AdminClient
from roster_client.serve.stack import Endpoints, Stack
from roster_protos import inference_pb2 as pb

SESSIONS = 4
FIRST_WARM_UP, WARM_UP = 24, 4
"""Warm-up requests before the very first case, and before the first case of each other policy."""


def command() -> str:
    """Returns the command that repeats the whole comparison."""
    return provenance.command_line("python -m bench.gpu_comparison")


def card(device: str) -> str:
    """Returns the name of the device, in the same words on both sides."""
    return (provenance.gpu_card() if device.startswith("cuda") else None) or provenance.cpu_card()


def settings(options: argparse.Namespace, run_s: float) -> dict[str, object]:
    """Returns the settings of a run of either side, for its header."""
    return {
        "given_up_s": run_s,
        "ttft_target_ms": options.ttft_target_ms,
        "itl_target_ms": options.itl_target_ms,
        "kv_tokens": options.kv_tokens,
    }


async def measure_policies(
    options: argparse.Namespace, cases: Sequence[Case], model: str, budget: Budget, prepared: Callable[[], object]
) -> None:
    """Measures the cases in order; each run is on disk before the next begins.

    `prepared` blocks until the other side's process no longer uses the machine.
    """
    began_s = time.monotonic()
    async with _stack(options, model) as stack:
        served = await stack.wait_ready(budget.left_s)
        print(f"ready after {time.monotonic() - began_s:.1f} s: {served.name}", flush=True)
        loads = await asyncio.to_thread(workloads, options, cases, served.vocab_size)
        await asyncio.to_thread(prepared)
        print(f"measuring after {time.monotonic() - began_s:.1f} s", flush=True)
        policies = _Policies(stack, options, served)
        for case in cases:
            run_s = budget.run_s(case, loads[case.load], options.drain)
            if run_s is not None:
                run = await policies.measure(case, loads[case.load], run_s)
                append_run(records_file(options), run)
                print(line(run), flush=True)


def _stack(options: argparse.Namespace, model: str) -> Stack:
    runner: dict[str, object] = {"model": model, "device": options.device, "threads": options.threads}
    runner |= {"slots": options.slots, "kv_tokens": options.kv_tokens, "log_level": "warning"}
    runner |= {"weights": "random"} if options.shape else {}
    given = GPU_SCHEDULER_FLAGS if options.device.startswith("cuda") else ()
    flags = dict(flag.split("=", 1) for flag in options.scheduler_flag or given)
    # Every policy gets the same prompts, so prefixes of an earlier run must not be hit.
    scheduler = {"prefix_sharing": False, "log_level": "warning", **flags}
    return Stack(Endpoints.free(), scheduler=scheduler, runner=runner, on_line=_print)


class _Policies:
    """Measures cases on services that stay up."""

    def __init__(self, stack: Stack, options: argparse.Namespace, model: pb.GetModelResponse) -> None:
        self._addresses = stack.endpoints
        self._options = options
        self._model = model
        self._in_force = ""

    async def measure(self, case: Case, workload: Workload, run_s: float) -> Run:
        """Measures one run; swaps and warms up the policy first if another one was active."""
        count = 0
        if case.system != self._in_force:
            count = WARM_UP if self._in_force else FIRST_WARM_UP
            await self._put_in_force(case.system)
        facts = await service_settings(self._addresses.admin_listen)
        async with GrpcTarget(self._addresses.listen, sessions=SESSIONS) as target:
            system = SystemUnderLoad(
                case.system,
                target,
                self._options.shape or self._model.name,  # otherwise the name would be that of a temporary folder
                card(self._options.device),
                facts | settings(self._options, run_s),
                self._addresses.admin_listen,
            )
            return await measure(
                system,
                named(workload, f"{case.system}-{case.load}"),
                command=command(),
                seed=SEED,
                warmup=named(warm_up(self._options, count, self._model.vocab_size), case.system).requests
                if count
                else (),
                end_s=run_s,
            )

    async def _put_in_force(self, policy: str) -> None:
        """Swaps the policy; only `fcfs` gets a chunk size, the others take whole prompts."""
        parameters = {"step_tokens": self._options.step_tokens} if policy == "fcfs" else {}
        async with AdminClient(self._addresses.admin_listen) as admin:
            await admin.set_policy(policy, parameters, deadline_s=30)
        self._in_force = policy


def _print(name: str, text: str) -> None:
    print(f"{name:>9} │ {text}", flush=True)
