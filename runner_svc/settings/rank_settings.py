"""Which settings a group of ranks can't be used with."""

from __future__ import annotations

from typing import Protocol


class RankSettings(Protocol):
    """The settings that matter to a group."""

    @property
    def tensor_parallel(self) -> int: ...
    @property
    def nnodes(self) -> int: ...
    @property
    def rdzv_endpoint(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def decoder(self) -> str: ...
    @property
    def move_listen(self) -> str: ...
    @property
    def launcher(self) -> str: ...
    @property
    def groups(self) -> int: ...
    @property
    def health_listen(self) -> str: ...


def check_ranks(settings: RankSettings) -> None:
    """Raises ValueError, with one sentence, for settings that don't go together."""
    size = settings.tensor_parallel
    _check_launcher(settings)
    if settings.nnodes > 1:
        raise ValueError(f"nnodes is {settings.nnodes}, but ranks on several hosts are not served yet: set it to 1")
    if settings.rdzv_endpoint:
        raise ValueError(
            f"rdzv_endpoint is {settings.rdzv_endpoint!r}, but ranks on several hosts are not served yet: leave it out"
        )
    if size == 1:
        return
    if settings.device == "null":
        raise ValueError(
            f"tensor_parallel is {size}, but the test backend 'null' has nothing to divide: set tensor_parallel to 1"
        )
    if settings.decoder == "transformers":
        raise ValueError(
            f"tensor_parallel is {size}, but decoder is 'transformers', whose layers can't be divided: set "
            "tensor_parallel to 1, or decoder to 'roster'"
        )
    if settings.move_listen:
        raise ValueError(
            f"tensor_parallel is {size}, but move_listen is {settings.move_listen!r}: the KV of a sequence lies on all "
            "ranks and can't move, so leave move_listen out"
        )


def _check_launcher(settings: RankSettings) -> None:
    if settings.launcher == "local" and settings.groups > 1:
        raise ValueError(
            f"groups is {settings.groups}, but launcher is 'local', which starts one: set groups to 1, or launcher to "
            "'ray'"
        )
    for name in ("move_listen", "health_listen"):
        if settings.groups > 1 and getattr(settings, name):
            raise ValueError(
                f"groups is {settings.groups}, but {name} is {getattr(settings, name)!r}, which can't be the address "
                f"of several runners: leave {name} out"
            )
