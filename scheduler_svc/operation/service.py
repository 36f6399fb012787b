"""The scheduler service: the engine in this process, front workers in others (with 0 of them, gRPC in this process).

SIGTERM or Ctrl-C drains: new requests are refused, running ones get `drain_s`, and a second signal ends them at once;
exit status 0. Exit status 2: unusable settings. Exit status 3: another scheduler has taken over the runners.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from errno import EADDRINUSE
from types import FrameType

import structlog
import zmq

from roster_common.distribution import version_line
from roster_common.logs import configure_logs, warn_unknown
from roster_common.service_command import read_command_line
from roster_common.setting_sources import UnusableSettings
from scheduler_svc.engine.engine_loop import EngineLoop
from scheduler_svc.front.auth.listen_address import ReservedAddress, reserve
from scheduler_svc.front.auth.server_credentials import ServerCredentials
from scheduler_svc.front.gateway.gateway_service import check_gateway, gateway_is_served
from scheduler_svc.front.rpc.wrong_port import GATEWAY_IS_OFF
from scheduler_svc.front.tracing.tracing import check_tracing
from scheduler_svc.metrics.collector import RosterCollector
from scheduler_svc.metrics.server import MetricsServer
from scheduler_svc.operation.worker_supervisor import WorkerSupervisor
from scheduler_svc.settings.exposure import exposed
from scheduler_svc.settings.scheduler_settings import SchedulerSettings

FENCED = 3
"""Exit status of a scheduler that another one has replaced."""
GRPC = ("listen", "admin_listen", "gateway_listen")
"""Settings of the addresses that front workers listen on."""

_LONGEST_FOLDER = 99
"""Bytes of the folder's path: with "/engine" it must fit into a Unix socket's address, 107."""

_ABOUT = "Schedules every step of its runners, and serves gRPC, until SIGTERM or Ctrl-C."

log = structlog.get_logger()


def run(first_worker: subprocess.Popen[bytes]) -> int:
    """Serves as flags, environment and file say until a signal ends it; returns the exit status.

    `first_worker` comes from `spawn_worker` and is killed if the settings ask for none. Must run in the main thread.
    """
    try:
        settings = read_command_line(SchedulerSettings, "roster-scheduler", _ABOUT, _version)
    except UnusableSettings as error:
        return _complain(str(error))
    else:
        configure_logs(settings.log_format, settings.log_level)
        warn_unknown()
        if not settings.front_workers:
            first_worker.kill()
        return serve(settings, first_worker)
    finally:
        first_worker.kill()  # if it served, its supervisor has already ended it
        first_worker.wait()


def serve(settings: SchedulerSettings, first_worker: subprocess.Popen[bytes]) -> int:
    """Serves until a signal ends it; returns the exit status."""
    try:
        socket_folder = _socket_folder()
    except UnusableSettings as error:
        return _complain(str(error))
    with socket_folder as folder:
        try:
            check_tracing(settings)
            ServerCredentials.open(settings)  # reports an unusable file here rather than in each worker
            check_gateway(settings)
            addresses = _reserved(settings)
            if reason := exposed(settings):
                return _complain(reason)
            loop = EngineLoop(settings, f"ipc://{folder}/engine")
            metrics = _metrics_server(settings, loop)
        except ValueError as error:
            return _complain(str(error))
        except OSError as error:
            return _complain(f"{error.strerror or error}; {_remedy(error)}")
        except zmq.ZMQError as error:
            reason = zmq.strerror(error.errno or 0)
            return _complain(f"link {settings.link!r} can't be bound: {reason}; {_remedy(error)}")
        settings = _with_addresses(settings, addresses)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: _stop(loop, number, frame))
        log.info(
            "listening",
            address=settings.listen,
            admin=settings.admin_listen,
            gateway=settings.gateway_listen,
            metrics=metrics.address if metrics is not None else "",
            workers=settings.front_workers,
        )
        if not gateway_is_served():
            log.info(GATEWAY_IS_OFF)
        try:
            if settings.front_workers:
                _serve_with_workers(settings, loop, f"ipc://{folder}/engine", first_worker)
            else:
                _serve_in_process(settings, loop, f"ipc://{folder}/engine")
        finally:
            if metrics is not None:
                metrics.close()
            for address in addresses:
                address.close()
    log.info("stopped")
    return FENCED if loop.fenced else 0


def _reserved(settings: SchedulerSettings) -> list[ReservedAddress]:
    """Binds the addresses that front workers listen on. Raises UnusableSettings, which names the setting."""
    reserved = []
    for name in GRPC:
        address = getattr(settings, name)
        if not address:
            continue
        try:
            reserved.append(reserve(address))
        except ValueError as error:
            raise UnusableSettings(f"setting {name}: {error}") from error
        except OSError as error:
            raise UnusableSettings(f"setting {name}: {error.strerror}; {_remedy(error)}") from error
    return reserved


def _remedy(error: OSError | zmq.ZMQError) -> str:
    """Returns what to do about an address that can't be used."""
    return "set another address" + (", or end the program that uses this one" if error.errno == EADDRINUSE else "")


def _socket_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes the folder of the engine's socket, below TMPDIR or /tmp. Raises UnusableSettings."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="roster-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UnusableSettings(
            f"the engine's socket needs a temporary folder ({error.strerror}): set TMPDIR to a writable one"
        ) from error
    if len(os.fsencode(folder.name)) > _LONGEST_FOLDER:
        folder.cleanup()
        raise UnusableSettings(
            f"TMPDIR is {tempfile.gettempdir()!r}, which is too long for the path of a socket: set it to a shorter one"
        )
    return folder


def _metrics_server(settings: SchedulerSettings, loop: EngineLoop) -> MetricsServer | None:
    """Closes the loop and raises OSError if the address can't be listened on, UnusableSettings if it is none."""
    if not settings.metrics_listen:
        return None
    try:
        return MetricsServer(settings.metrics_listen, RosterCollector(loop.snapshots.ask))
    except ValueError as error:
        loop.close()
        raise UnusableSettings(f"setting metrics_listen: {error}") from error
    except OSError:
        loop.close()
        raise


def _stop(loop: EngineLoop, number: int, frame: FrameType | None) -> None:
    loop.stop()


def _with_addresses(settings: SchedulerSettings, addresses: list[ReservedAddress]) -> SchedulerSettings:
    """Returns the settings with the ports in use instead of port 0."""
    names = [name for name in GRPC if getattr(settings, name)]
    return settings.model_copy(update={name: address.address for name, address in zip(names, addresses, strict=True)})


def _serve_with_workers(
    settings: SchedulerSettings, loop: EngineLoop, endpoint: str, first_worker: subprocess.Popen[bytes]
) -> None:
    workers = WorkerSupervisor(settings, endpoint, first_worker)
    workers.start()
    try:
        loop.run()
    finally:
        workers.stop()
        loop.close()


def _serve_in_process(settings: SchedulerSettings, loop: EngineLoop, endpoint: str) -> None:
    """Runs the engine in a thread, since gRPC's loop needs the main thread. Closing the pipe ends the front."""
    from scheduler_svc.front.worker import run_front

    reader, writer = os.pipe()

    def run_engine() -> None:
        try:
            loop.run()
            loop.close()
        finally:
            os.close(writer)

    engine = threading.Thread(target=run_engine, name="engine")
    engine.start()
    try:
        run_front(settings, 0, endpoint, reader)
    finally:
        loop.stop()
        engine.join()
        os.close(reader)


def _version() -> str:
    return version_line("roster-scheduler")


def _complain(sentence: str) -> int:
    """Writes the error to stderr; returns the exit status."""
    print(f"roster-scheduler: {sentence}", file=sys.stderr)
    return 2
