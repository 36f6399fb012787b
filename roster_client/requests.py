"""What a request is made of, for `from roster_client.requests import Message`."""

from roster_client.client.requests import Message, OnDisconnect, Options, Prompt

__all__ = ["Message", "OnDisconnect", "Options", "Prompt"]
