from __future__ import annotations

import asyncio
import sys
import time

import psutil
import pytest

from roster_client.serve.child_process import ChildProcess
from tests.support.process_state import running

IGNORE_SIGTERM = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
STUBBORN = f"""{IGNORE_SIGTERM}
child = subprocess.Popen([sys.executable, "-c", {IGNORE_SIGTERM + " time.sleep(60)"!r}])
print(child.pid, flush=True)
time.sleep(60)
"""


async def start(code: str, lines: list[str]) -> ChildProcess:
    return await ChildProcess.start("child", [sys.executable, "-c", code], lambda name, line: lines.append(line))


async def wait_for_lines(lines: list[str], count: int) -> None:
    deadline = time.monotonic() + 20
    while len(lines) < count:
        assert time.monotonic() < deadline, lines
        await asyncio.sleep(0.02)


async def test_lines_of_both_streams_and_progress() -> None:
    lines: list[str] = []
    code = (
        "import sys; sys.stdout.write('10%\\r50%\\r100%\\n'); sys.stdout.flush();"
        " sys.stderr.buffer.write(b'bad \\xff byte\\nno newline')"
    )
    child = await start(code, lines)
    assert await child.wait() == 0
    await child.stop(1)
    assert lines == ["10%", "50%", "100%", "bad � byte", "no newline"] == list(child.tail)


async def test_stop_is_a_plain_sigterm() -> None:
    lines: list[str] = []
    child = await start("import signal; print('up', flush=True); signal.sigwait([15]); print('bye')", lines)
    # Until sigwait blocks the signal, its handler is the default: the child ends at once in both cases.
    await wait_for_lines(lines, 1)
    started = time.monotonic()
    await child.stop(20)
    assert time.monotonic() - started < 10 and child.returncode is not None


async def test_a_second_sigterm_after_a_while() -> None:
    """As a scheduler without a runner needs, which else waits for requests that can't finish."""
    lines: list[str] = []
    drain = "signal.sigwait([15]); print('drains', flush=True); signal.sigwait([15]); sys.exit(7)"
    child = await start(f"import signal, sys; signal.pthread_sigmask(0, [15]); print('up', flush=True); {drain}", lines)
    await wait_for_lines(lines, 1)
    await child.stop(20, again_s=0.1)
    assert lines == ["up", "drains"] and child.returncode == 7


@pytest.mark.parametrize("cancelled", [False, True])
async def test_the_whole_group_is_killed_in_the_end(cancelled: bool) -> None:
    lines: list[str] = []
    child = await start(STUBBORN, lines)
    await wait_for_lines(lines, 1)
    grandchild = psutil.Process(int(lines[0]))
    if cancelled:
        stopping = asyncio.create_task(child.stop(60))
        await asyncio.sleep(0.2)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
    else:
        await child.stop(0.3)
    assert child.returncode == -9
    _, alive = await asyncio.to_thread(psutil.wait_procs, [grandchild], 5)
    assert running(alive) == []


async def test_a_missing_command_is_an_os_error() -> None:
    with pytest.raises(OSError):
        await ChildProcess.start("child", ["/nonexistent/command"], lambda name, line: None)
