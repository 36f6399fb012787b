"""Ranks of one group on several hosts: what their launchers tell one another, so that each host's board shows all."""
