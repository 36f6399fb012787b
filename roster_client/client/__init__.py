"""The client library: typed gRPC calls, asynchronous and blocking."""

from roster_client.client.async_client import EventStream, RosterClient

__all__ = ["EventStream", "RosterClient"]
