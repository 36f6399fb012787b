"""Links to the runners over ZeroMQ (sessions, resending, fencing, CURVE) and to the front workers."""
