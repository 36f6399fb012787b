"""Both services for one process that uses them alone: addresses, settings by name, and errors that name the log."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from roster_client.offline.service_log import ServiceLog
from roster_client.options.from_settings import FOR_OTHERS
from roster_client.serve.stack import Endpoints, NotReadyError, ServiceDiedError, Stack
from roster_common.extras import services_lack
from roster_protos import inference_pb2 as pb

READY_TIMEOUT_S = 600.0


class ServicesFailedError(Exception):
    """The services did not start, or one of them ended; the message names their log."""


class Settings:
    """Settings of both services, given by name."""

    def __init__(self, given: Mapping[str, object]) -> None:
        """Raises TypeError for a name that no service has or that can't be given.

        Raises ValueError for a value that the runner would refuse, and if an extra is not installed.
        """
        from runner_svc.settings.runner_settings import RunnerSettings
        from scheduler_svc.settings.scheduler_settings import SchedulerSettings

        both = {*SchedulerSettings.model_fields, *RunnerSettings.model_fields}
        if apart := sorted({*given} & {*FOR_OTHERS}):
            raise TypeError(f"{', '.join(apart)} can't be set: the services listen on free loopback ports, unprotected")
        known = sorted(both - {*FOR_OTHERS})
        if unknown := sorted(set(given) - set(known)):
            raise TypeError(f"unknown setting {', '.join(unknown)}; known are {', '.join(known)}")
        runner = {name: given[name] for name in given if name in RunnerSettings.model_fields}
        unset = dict.fromkeys(each for each in FOR_OTHERS if each in RunnerSettings.model_fields and each != "link")
        if reason := services_lack(RunnerSettings.read(**runner, **unset).device):
            raise ValueError(reason)
        self.scheduler = _flags({name: given[name] for name in given if name in SchedulerSettings.model_fields})
        self.runner = _flags(runner)


def _flags(settings: Mapping[str, object]) -> dict[str, object]:
    return {name: json.dumps(value) if isinstance(value, Mapping) else value for name, value in settings.items()}


@asynccontextmanager
async def own_services(
    settings: Settings, log: ServiceLog, ready_timeout_s: float = READY_TIMEOUT_S
) -> AsyncIterator[tuple[Stack, pb.GetModelResponse]]:
    """Runs both services on free loopback ports, without TLS and tokens; yields them and the model once they are ready.

    Raises ServicesFailedError if they do not become ready.
    """
    without = {f"ROSTER_{name.upper()}" for name in FOR_OTHERS}
    environment = {name: value for name, value in os.environ.items() if name not in without}
    stack = Stack(
        Endpoints.free(),
        scheduler=settings.scheduler,
        runner=settings.runner,
        on_line=log.line,
        environment=environment,
    )
    try:
        async with stack:
            yield stack, await stack.wait_ready(ready_timeout_s)
    except (ServiceDiedError, NotReadyError) as error:
        raise failed(error, log) from None


def failed(error: Exception, log: ServiceLog) -> ServicesFailedError:
    """Returns the error with the log's path, and keeps the log."""
    log.keep = True
    return ServicesFailedError(f"{error} (log: {log.path})")


def log_for(path: str | Path | None) -> ServiceLog:
    """Returns the services' log. Raises OSError."""
    return ServiceLog(Path(path).expanduser() if path is not None else None)
