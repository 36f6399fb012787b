"""Chooses the device. Imports torch only if the choice depends on it; test backends start without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import structlog

from roster_common.setting_sources import UnusableSettings
from runner_svc.settings.runner_settings import RunnerSettings

if TYPE_CHECKING:
    from runner_svc.startup.gpu_probe import Obstacle

log = structlog.get_logger()


class BrokenGpu(RuntimeError):
    """The GPU failed, and this process can no longer use it; a new process may."""


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The chosen device and, if "auto" chose the CPU, the reason that the GPU can't be used."""

    device: Literal["cpu", "cuda", "hash", "null"]
    obstacle: Obstacle | None = None

    @property
    def why(self) -> dict[str, str]:
        """Fields that a log line adds to the device."""
        return {"no_gpu": self.obstacle.why} if self.obstacle is not None else {}

    def tell(self) -> None:
        """Logs why "auto" chose the CPU: a warning if there is a GPU, information otherwise."""
        if self.obstacle is None:
            return
        if self.obstacle.gpu_is_here:
            log.warning(
                "the GPU is not used: the model runs on the CPU", reason=self.obstacle.why, advice=self.obstacle.advice
            )
        else:
            advice = {"advice": self.obstacle.advice} if self.obstacle.remedy else {}
            log.info("the model runs on the CPU", reason=self.obstacle.why, **advice)


def choose_device(settings: RunnerSettings) -> DeviceChoice:
    """Returns the settings' device; "auto" is the GPU if it can be used, otherwise the CPU.

    Raises UnusableSettings if the device is "cuda" and can't be used, and if the libraries of real models are missing;
    with "auto" also if the GPU is only full or failing: a runner that restarts while another process still exits must
    not end up in float32 on the CPU.
    """
    if settings.device in ("hash", "null"):
        return DeviceChoice(settings.device)
    try:
        import torch  # noqa: F401

        from runner_svc.startup.gpu_probe import gpu_obstacle
    except (ImportError, OSError) as error:  # OSError: a shared library that torch loads
        raise UnusableSettings(
            f"serving a model needs the extra 'runner' (pip install 'roster-serve[runner]'): {error}"
        ) from error
    if settings.device == "cpu":
        return DeviceChoice("cpu")
    obstacle = gpu_obstacle(settings.cache_dir)
    if obstacle is None:
        return DeviceChoice("cuda")
    if settings.device == "cuda" or obstacle.may_pass:
        raise UnusableSettings(f"device is {settings.device!r}, but {obstacle}")
    return DeviceChoice("cpu", obstacle)
