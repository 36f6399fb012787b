"""The links: to runners over ZeroMQ (sessions, resending, fencing, CURVE), and to the front workers."""
