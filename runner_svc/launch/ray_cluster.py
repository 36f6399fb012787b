"""Starts command lines on the nodes of a Ray cluster. The only module that imports Ray.

A command is an actor of a class without code of its own, whose name alone Ray pickles. Ray gives a group's actor a
bundle of the placement group, so that all ranks of a group are on one node, each with a GPU of its own.
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roster_common.setting_sources import UnusableSettings
from runner_svc.launch.ray_launcher import CommandLost, Resources


class RunnerCommand(subprocess.Popen[bytes]):
    """A process on a node of the cluster."""

    __class_getitem__ = None  # type: ignore[assignment]  # Ray looks for the signature of every method


class RayCluster:
    """A placement group with a bundle for each group of ranks."""

    def __init__(self, groups: int, each: Resources) -> None:
        """`each`: what a group needs. Raises UnusableSettings if there is no cluster."""
        try:
            ray.init(address="auto", configure_logging=False, log_to_driver=True)
        except (ConnectionError, RayError, RuntimeError, ValueError) as error:
            raise UnusableSettings(
                f"launcher is 'ray', but no Ray cluster is found ({_first_line(error)}): start one with `ray start "
                "--head`, or set RAY_ADDRESS to its address"
            ) from error
        self._each = each
        bundle = {name: float(count) for name, count in (("CPU", each.cpus), ("GPU", each.gpus)) if count}
        self._bundles = placement_group([bundle] * groups, strategy="SPREAD")
        self._command = ray.remote(RunnerCommand)
        self._asked: dict[Any, Any] = {}  # by command, the answer that is awaited

    def has_room(self, seconds: float) -> bool:
        """Waits for room for all groups, at most so long; returns whether the cluster has it."""
        return bool(self._bundles.wait(seconds))

    def start(self, group: int, command: list[str]) -> Any:
        """Starts a command in the group's bundle; returns it."""
        place = PlacementGroupSchedulingStrategy(self._bundles, group)
        options = self._command.options(
            num_cpus=self._each.cpus, num_gpus=self._each.gpus, scheduling_strategy=place, max_restarts=0
        )
        return options.remote(command)

    def status(self, command: Any) -> int | None:
        """Returns the command's exit status; None while it runs, or while its answer is awaited.

        Does not wait: a node that answers late delays no other group. Raises CommandLost with its node.
        """
        if command not in self._asked:
            self._asked[command] = command.poll.remote()
        done, _ = ray.wait([self._asked[command]], timeout=0)
        if not done:
            return None
        try:
            status: int | None = ray.get(self._asked.pop(command))
        except RayError as error:
            raise CommandLost(_first_line(error)) from error
        return status

    def stop(self, command: Any) -> None:
        """Sends the command SIGTERM, without waiting for its node."""
        command.terminate.remote()

    def remove(self, command: Any) -> None:
        """Ends the command, if it runs, and its actor."""
        self._asked.pop(command, None)
        with suppress(RayError):
            ray.kill(command)

    def close(self) -> None:
        """Leaves the cluster, which ends what runs."""
        ray.shutdown()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
