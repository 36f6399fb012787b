"""The HTTP port that Prometheus scrapes: serves /metrics in threads of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from roster_common.endpoints import split_address
from scheduler_svc.metrics.snapshot_exchange import EngineSilent

SILENT_CLIENT_S = 10
"""Seconds after which a connection that sends nothing is closed."""


class MetricsServer:
    """Serves a collector until closed."""

    def __init__(self, listen: str, collector: Collector) -> None:
        """Binds `listen`, host:port; port 0 picks a free one. Raises ValueError or OSError, each naming the address."""
        host, port = split_address(listen, "127.0.0.1:50064")
        registry = CollectorRegistry()
        registry.register(collector)
        try:
            self._server = (_Server6 if ":" in host else _Server)((host, port), _Handler)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen on {listen} for metrics: {error.strerror}") from error
        self._server.set_app(_only_metrics(make_wsgi_app(registry)))
        self.address = f"{listen.rpartition(':')[0]}:{self._server.server_port}"
        """host:port with the port in use."""
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving scrapes."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = SILENT_CLIENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing for a scrape."""


def _only_metrics(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Returns an app that serves /metrics, with 503 while the engine does not answer; other paths get 404."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/metrics":
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"metrics are at /metrics\n"]
        try:
            return app(environ, start_response)
        except EngineSilent as error:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [f"{error}\n".encode()]

    return answer
