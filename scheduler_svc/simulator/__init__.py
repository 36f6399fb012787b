"""Simulator: the production engine, scheduler and policies on a virtual clock, for trying policies before use."""
