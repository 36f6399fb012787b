"""What computes. torch is imported only where that is in question: the test backends start without it."""

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
    """The GPU failed in this process, which can't use it any more; another process may."""


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """A device, and what kept the model off a GPU where one was free to take it."""

    device: Literal["cpu", "cuda", "hash", "null"]
    obstacle: Obstacle | None = None

    @property
    def why(self) -> dict[str, str]:
        """What a log line that tells the device says beside it."""
        return {"no_gpu": self.obstacle.why} if self.obstacle is not None else {}

    def tell(self) -> None:
        """Logs that it is the CPU and why: nothing is wrong where there is no GPU."""
        if self.obstacle is None:
            return
        if self.obstacle.gpu_is_here:
            log.warning(
                "the GPU is not used: this runs on the CPU", reason=self.obstacle.why, advice=self.obstacle.advice
            )
        else:
            advice = {"advice": self.obstacle.advice} if self.obstacle.remedy else {}
            log.info("this runs on the CPU", reason=self.obstacle.why, **advice)


def choose_device(settings: RunnerSettings) -> DeviceChoice:
    """What the settings say; "auto" is a GPU that can be used, or else the CPU.

    Raises UnusableSettings for a GPU that can't be used, and where the libraries of real models are missing. With
    "auto" too, where the GPU is only full or ill: a restart beside a process that still ends must not leave a runner
    in float32 on the CPU.
    """
    if settings.device in ("hash", "null"):
        return DeviceChoice(settings.device)
    try:
        import torch  # noqa: F401

        from runner_svc.startup.gpu_probe import gpu_obstacle
    except (ImportError, OSError) as error:  # the latter: a library that torch loads
        raise UnusableSettings(
            f"a model needs the extra 'runner' (pip install 'roster-serve[runner]'): {error}"
        ) from error
    if settings.device == "cpu":
        return DeviceChoice("cpu")
    obstacle = gpu_obstacle()
    if obstacle is None:
        return DeviceChoice("cuda")
    if settings.device == "cuda" or obstacle.may_pass:
        raise UnusableSettings(f"device is {settings.device!r}, but {obstacle}")
    return DeviceChoice("cpu", obstacle)
