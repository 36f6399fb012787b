"""Records a running service over its admin API. The service reports steps only while they are watched."""

from __future__ import annotations

import asyncio

from roster_client.client.admin import AdminClient, StepStream
from roster_client.client.credentials import Credentials
from roster_client.timeline.recording import RecordingWriter


async def record(steps: StepStream, recorder: RecordingWriter) -> None:
    """Writes every step until the stream ends. Raises RosterError if the service ends."""
    async for report in steps:
        recorder.report(report)


async def record_live(target: str, credentials: Credentials, recorder: RecordingWriter, seconds: float) -> None:
    """Records the service at this admin address for `seconds`, titled with its policy. Raises RosterError."""
    async with AdminClient(target, credentials=credentials) as admin:
        status = await admin.get_status(deadline_s=10)
        recorder.begin(f"{status.policy} at {target}")
        steps = await admin.watch_steps(done=True)
        try:
            async with asyncio.timeout(seconds):
                await record(steps, recorder)
        except TimeoutError:
            pass
        finally:
            steps.cancel()
