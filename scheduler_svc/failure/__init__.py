"""Failure handling: lost runners, takeover by a new scheduler, requests that crash runners, disconnected clients."""
