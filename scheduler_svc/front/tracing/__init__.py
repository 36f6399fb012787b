"""OpenTelemetry spans of requests, made when they have ended. Nothing of OpenTelemetry is imported while it is off."""
