"""`roster calibrate`: times a runner's steps with the real engine and writes a cost model for `roster simulate`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from roster_client.commands.services import check_settings
from roster_client.commands.simulate import MISSING
from roster_client.options.output_files import check_outputs
from roster_common.endpoints import check_link
from roster_common.setting_options import as_arguments

if TYPE_CHECKING:
    from scheduler_svc.simulator.calibration.calibration import Calibrator

GRACE_S = 10.0


def calibrate(
    output: Annotated[Path, typer.Argument(help="File of the cost model, JSON; its stem is the cost model's name.")],
    model: Annotated[str | None, typer.Option("--model", help="Model of the runner (default: smollm2).")] = None,
    device: Annotated[str | None, typer.Option("--device", help="Device of the runner (default: auto).")] = None,
    slots: Annotated[int | None, typer.Option("--slots", min=1, help="Maximum number of running sequences.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=0, help="CPU threads of the runner.")] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", help="Start no runner, but wait for one at this ZeroMQ endpoint.")
    ] = None,
    steps_file: Annotated[Path | None, typer.Option("--steps", help="Also write every timed step, JSON.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="Approximate time to measure.")] = 60.0,
    ready_timeout: Annotated[float, typer.Option("--ready-timeout", min=1, help="Seconds to load the model.")] = 600.0,
) -> None:
    """Measure a runner's step times and fit a cost model to them. The machine should be otherwise idle."""
    try:
        import scheduler_svc.simulator.calibration.calibration  # noqa: F401
        from roster_common.logs import configure_logs
    except ImportError as error:
        raise ValueError(f"{MISSING} ({error})") from error
    configure_logs("console", "warning")
    check_outputs(output, steps_file)
    flags: dict[str, object] = {"model": model, "device": device, "slots": slots, "threads": threads}
    if listen is not None and any(value is not None for value in flags.values()):
        raise ValueError("--listen waits for a runner that you start: pass --model, --device and so on to that runner")
    if listen is None:
        check_settings({}, {name: value for name, value in flags.items() if value is not None})
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="roster-") as folder:
        calibrator = _bound(listen or f"ipc://{folder}/link")
        try:
            with (
                started_runner(None if listen else calibrator.endpoint, flags) as alive,
                console.status("loading") as status,
            ):
                calibrator.wait_for_runner(ready_timeout, alive)
                result = calibrator.run(output.stem, seconds, lambda steps: status.update(f"{steps} steps timed"))
        finally:
            calibrator.close()
    output.write_text(result.model.model_dump_json(indent=2) + "\n")
    if steps_file is not None:
        steps_file.write_text(json.dumps([asdict(step) for step in result.steps]))
    fit = result.error
    print(
        f"{output}: {fit.steps} steps, error of the model p50 {fit.median:.1%}, p90 {fit.p90:.1%}, "
        f"spread {fit.spread:.3f}, {fit.left_out} disturbed steps excluded; "
        f"the runner's own timings account for {result.timings_share:.1%} of the time"
    )


def _bound(endpoint: str) -> Calibrator:
    """Returns the calibrator that waits for a runner at `endpoint`. Raises ValueError if it can't be bound."""
    import zmq

    from scheduler_svc.simulator.calibration.calibration import Calibrator

    try:
        return Calibrator(check_link(endpoint))
    except zmq.ZMQError as error:
        reason = zmq.strerror(error.errno or 0)
        raise ValueError(f"--listen {endpoint!r} can't be bound: {reason}; name another endpoint") from error


@contextmanager
def started_runner(endpoint: str | None, flags: dict[str, object]) -> Iterator[Callable[[], None]]:
    """Runs a runner that connects to `endpoint` (None: an external one); yields a check that raises if it exited."""
    if endpoint is None:
        yield lambda: None
        return
    given = as_arguments({name: value for name, value in flags.items() if value is not None})
    command = [sys.executable, "-m", "runner_svc.main", "--link", endpoint, *given]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def alive() -> None:
        if process.poll() is not None:
            raise ValueError(f"the runner ended with exit status {process.returncode}; see its output above")

    try:
        yield alive
    finally:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
