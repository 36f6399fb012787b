"""OpenTelemetry spans of requests, written when a request has ended. Imports OpenTelemetry only if tracing is on."""
