"""Moves of KV blocks between runners: what a source serves, how a target pulls, and the transports."""
