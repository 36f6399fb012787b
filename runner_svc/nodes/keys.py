"""CURVE between the launchers of one group: all have the key of the runner that they are, and accept no other."""

from __future__ import annotations

from typing import Any

import zmq

from roster_common.curve_server import CurveServer


class GroupKeys:
    """The runner's pair of keys, in Z85."""

    def __init__(self, secret: bytes, public: bytes) -> None:
        self._secret, self.public = secret, public

    def protect_server(self, context: zmq.Context[Any], socket: zmq.Socket[bytes]) -> None:
        """Makes a socket that is not yet bound accept owners of the same key only."""
        refusal = "this is not the key of the runner"
        CurveServer(context, self._secret, "nodes", self.public.__eq__, refusal).protect(socket)

    def protect_client(self, socket: zmq.Socket[bytes]) -> None:
        """Makes a socket that is not yet connected talk to an owner of the same key only."""
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
