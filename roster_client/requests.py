"""Types of a request's arguments, for `from roster_client.requests import Message`."""

from roster_client.client.requests import Message, OnDisconnect, Options, Prompt

__all__ = ["Message", "OnDisconnect", "Options", "Prompt"]
