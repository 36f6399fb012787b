"""Recordings of a service's steps, and their pictures and traces for Perfetto."""
