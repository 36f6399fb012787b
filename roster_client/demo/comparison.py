"""`roster demo`: runs eight prompts at once with continuous batching, with static batches, and then with drafts.

It prints a table of the runs. Both services run on this machine. Between two runs only the scheduler is replaced; the
runner keeps its weights. The runs without drafts forbid them in their requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from roster_client.client.admin import AdminClient, StepStream
from roster_client.client.async_client import EventStream, RosterClient
from roster_client.client.errors import RosterError
from roster_client.client.events import Delta, Finish, Usage
from roster_client.demo.live_view import LiveView
from roster_client.demo.plain_view import PlainView
from roster_client.demo.prompts import DEMO_REQUESTS
from roster_client.demo.run import DemoAnswer, DemoRun, Measurement, RosterChange, new_run
from roster_client.serve.signals import cancelled_by_signals
from roster_client.serve.stack import Endpoints, NotReadyError, ServiceDiedError, Stack
from roster_client.terminal.exit_codes import ExitCode
from roster_client.terminal.log_view import LogView
from roster_client.timeline.live import record
from roster_client.timeline.recording import RecordingWriter

TITLES = {
    "fcfs": "fcfs: continuous batching, a free slot takes the next request at once",
    "static": "static: a batch starts when all requests of the previous one have finished",
}
POLICIES = tuple(TITLES)
DRAFTER = "ngram"
DRAFTING_DEVICES = ("cpu", "hash")
"""Devices whose runners can verify drafts so far."""
LAST_STEP_S = 0.3
"""Time to wait for the report of the last step, which arrives shortly after the last token."""
WARM_UP_TOKENS = 4
READY_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 600.0


class View(Protocol):
    """Shows a run: receives `begin`, then steps, texts and finished answers as they come, then `end`."""

    def begin(self, run: DemoRun) -> None: ...

    def step(self, run: DemoRun, change: RosterChange | None) -> None: ...

    def text(self, answer: DemoAnswer) -> None: ...

    def finished(self, answer: DemoAnswer) -> None: ...

    def end(self) -> None: ...


async def demo(
    console: Console, runner: dict[str, object], *, plain: bool, recorder: RecordingWriter | None = None
) -> ExitCode:
    """Runs the demo with these runner settings; stops both services, also on errors and signals.

    `recorder` records every step of the two policies' runs.
    """
    view: View = PlainView(console) if plain else LiveView(console)
    log = LogView(console)
    drafts = runner.get("device") in DRAFTING_DEVICES
    runner = runner | {"draft": DRAFTER} if drafts else runner
    stack = Stack(Endpoints.free(), scheduler={"policy": POLICIES[0]}, runner=runner, on_line=log.line)
    try:
        with cancelled_by_signals():
            async with stack:
                measurements, same = await _compare(view, log, stack, recorder, drafts)
    except asyncio.CancelledError:
        console.print("Interrupted: both services are stopped.", highlight=False)
        return ExitCode.INTERRUPTED
    except (ServiceDiedError, NotReadyError, RosterError, TimeoutError) as error:
        console.print(f"[red]{escape(str(error) or 'the run took too long')}[/]", highlight=False, soft_wrap=True)
        return ExitCode.FAILED
    finally:
        view.end()
    console.print(comparison(measurements))
    console.print(f"{same} of {len(DEMO_REQUESTS)} answers are the same in all runs.", highlight=False)
    return ExitCode.OK


async def _compare(
    view: View, log: LogView, stack: Stack, recorder: RecordingWriter | None, drafts: bool
) -> tuple[list[Measurement], int]:
    """Makes one run per policy, and with `drafts` one more of the first; also returns the number of equal answers."""
    measurements: list[Measurement] = []
    texts: list[list[str]] = []
    runs = [new_run(policy, DEMO_REQUESTS) for policy in POLICIES]
    for run in [*runs, *([new_run(POLICIES[0], DEMO_REQUESTS, drafts=True)] if drafts else [])]:
        if measurements:  # also for the same policy: no run finds the prefixes of another
            await stack.swap_scheduler(policy=run.policy)
        with log.waiting(f"Starting the services under {run.name} ..."):
            await stack.wait_ready(READY_TIMEOUT_S)
        log.muted = True
        async with asyncio.timeout(RUN_TIMEOUT_S), _recorded(stack.endpoints, run, None if run.drafts else recorder):
            measurements.append(await run_policy(stack.endpoints, view, run))
        texts.append([answer.text for answer in run.answers])
    return measurements, sum(len(set(answers)) == 1 for answers in zip(*texts, strict=True))


async def run_policy(endpoints: Endpoints, view: View, run: DemoRun) -> Measurement:
    """Streams all requests at once while watching the roster. Raises RosterError if one fails."""
    # Request ids belong to a tenant: a tenant per run keeps it from attaching to the previous run's answers.
    client = RosterClient(endpoints.listen, tenant=run.name)
    async with client, AdminClient(endpoints.admin_listen) as admin:
        steps = await admin.watch_steps()
        watching = asyncio.create_task(_watch(steps, view, run))
        try:
            # A short request runs until all others have arrived; otherwise `static` would batch the first one alone.
            warm_up = client.generate("Hello", request_id="warm-up", max_tokens=WARM_UP_TOKENS, ignore_eos=True)
            await _first_token(warm_up)
            view.begin(run)
            started = time.monotonic()
            await asyncio.gather(*[_stream(client, view, run, answer) for answer in run.answers])
            seconds = time.monotonic() - started
        finally:
            steps.cancel()
            watching.cancel()
            view.end()
    return run.measure(seconds)


@asynccontextmanager
async def _recorded(endpoints: Endpoints, run: DemoRun, recorder: RecordingWriter | None) -> AsyncIterator[None]:
    """Records every step within the context."""
    if recorder is None:
        yield
        return
    recorder.begin(TITLES[run.policy], {str(answer.number): answer.request.question for answer in run.answers})
    async with AdminClient(endpoints.admin_listen) as admin:
        recording = asyncio.create_task(record(await admin.watch_steps(done=True), recorder))
        try:
            yield
            await asyncio.sleep(LAST_STEP_S)
        finally:
            recording.cancel()


async def _first_token(stream: EventStream) -> None:
    async for event in stream:
        if isinstance(event, Delta):
            return


async def _stream(client: RosterClient, view: View, run: DemoRun, answer: DemoAnswer) -> None:
    request = answer.request
    answer.sent_s = time.monotonic()
    stream = client.generate(
        request.question,
        request_id=str(answer.number),
        temperature=0.0,
        max_tokens=request.max_tokens,
        speculate=run.drafts,
    )
    async for event in stream:
        if isinstance(event, Delta):
            run.take_delta(answer, event)
            view.text(answer)
        elif isinstance(event, Finish):
            run.take_finish(answer, event)
            view.finished(answer)
        elif isinstance(event, Usage):
            run.take_usage(event)


async def _watch(steps: StepStream, view: View, run: DemoRun) -> None:
    async for report in steps:
        view.step(run, run.take_step(report))


def comparison(measurements: Sequence[Measurement]) -> Table:
    """Returns the closing table, with one row per run."""
    table = Table(title="Continuous batching (fcfs) against static batches")
    for heading in ("policy", "tokens", "seconds", "tokens/s", "mean TTFT", "worst TTFT", "slots filled"):
        names = heading == "policy"
        table.add_column(heading, justify="left" if names else "right", no_wrap=names)
    for run in measurements:
        table.add_row(
            run.name,
            str(run.tokens),
            f"{run.seconds:.1f}",
            f"{run.tokens / run.seconds:.1f}",
            f"{run.mean_ttft_s:.2f} s",
            f"{run.worst_ttft_s:.2f} s",
            f"{run.mean_rows:.2f} of {run.slots}",
        )
    for run in measurements:
        if run.drafted_tokens:
            table.caption = f"{run.name}: {run.accepted_tokens} of {run.drafted_tokens} drafted tokens were accepted"
    return table
