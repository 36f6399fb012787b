"""The runner's gRPC health service (grpc.health.v1), at the address `health_listen`.

| service         | SERVING while                                            |
|-----------------|----------------------------------------------------------|
| ""              | this process answers, also while it loads its model      |
| "roster.runner" | the model is loaded and a scheduler answers on the link  |
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from roster_common.endpoints import check_free, split_address
from roster_common.setting_sources import UnusableSettings

if TYPE_CHECKING:
    import grpc
    from grpc_health.v1 import health

LIVENESS = ""
RUNNER = "roster.runner"
_THREADS = 4


class RunnerHealth:
    """The server; without an address it does nothing. `tell` is thread-safe."""

    def __init__(self, server: grpc.Server | None = None, servicer: health.HealthServicer | None = None) -> None:
        self._server = server
        self._servicer = servicer

    @classmethod
    def open(cls, listen: str) -> Self:
        """Listens at "host:port"; '' serves nothing. Raises UnusableSettings if the address can't be used."""
        if not listen:
            return cls()
        import grpc  # imported here, as most runners have no health service
        from grpc_health.v1 import health, health_pb2_grpc

        try:
            host, port = split_address(listen, "127.0.0.1:50066")
            check_free(host, port)  # gRPC would log the reason instead of raising it
            servicer = health.HealthServicer()
            server = grpc.server(ThreadPoolExecutor(_THREADS), options=(("grpc.so_reuseport", 0),))
            health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
            server.add_insecure_port(listen)
        except (ValueError, RuntimeError, OSError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UnusableSettings(f"health_listen is {listen!r}, which can't be listened on: {reason}") from error
        server.start()
        opened = cls(server, servicer)
        opened._set(LIVENESS, True)
        opened.tell(False)
        return opened

    def tell(self, serves: bool) -> None:
        """Sets whether a scheduler answers this runner."""
        self._set(RUNNER, serves)

    def close(self) -> None:
        """Stops the server at once."""
        if self._server is not None:
            self._server.stop(None)

    def _set(self, service: str, serves: bool) -> None:
        if self._servicer is not None:
            from grpc_health.v1 import health_pb2

            status = health_pb2.HealthCheckResponse
            self._servicer.set(service, status.SERVING if serves else status.NOT_SERVING)
