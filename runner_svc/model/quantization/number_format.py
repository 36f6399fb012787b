"""How one side of a product is quantized, as compressed-tensors' `QuantizationArgs` say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.quantization.config_reader import QuantizationKeys

_HARMLESS = {
    "observer": "It says how scales were found.",
    "observer_kwargs": "It says how scales were found.",
    "scale_dtype": "Scales have the types of their tensors.",
    "zp_dtype": "Zeros have the types of their tensors.",
}


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """Bits, type and scales of weights or of activations."""

    path: str
    bits: int
    type: str
    symmetric: bool
    strategy: str
    dynamic: bool
    group: int | None
    block: tuple[int, int] | None

    @classmethod
    def read(cls, raw: Mapping[str, Any], path: str) -> NumberFormat:
        """Reads an object that stands at `path` of config.json."""
        keys = QuantizationKeys(raw, path)
        group = keys.take("group_size", int, default=None)
        block = keys.take("block_structure", list, default=None)
        if group is None:
            inferred = "tensor"
        else:
            inferred = "channel" if group == -1 else "group"
        numbers = cls(
            path,
            keys.take("num_bits", int),
            keys.take("type", str),
            keys.take("symmetric", bool, default=True),
            keys.take("strategy", str, default=inferred),
            keys.only("dynamic", True, False, default=False),
            None if group == -1 else group,
            (block[0], block[1]) if block is not None and len(block) == 2 else None,
        )
        # "weight" orders columns while calibrating, and leaves them in their place.
        keys.only("actorder", "weight", "static", False, default=None)
        keys.harmless(_HARMLESS)
        keys.finish()
        numbers._check_sizes(block)
        return numbers

    def _check_sizes(self, block: list[Any] | None) -> None:
        """Refuses sizes that another strategy has: the package refuses them too."""
        for key, value, needed in (("group_size", self.group, "group"), ("block_structure", block, "block")):
            if value is not None and self.strategy != needed:
                raise UnsupportedModel(
                    f"The model's config.json has '{self.path}.{key}' {value!r} together with the strategy "
                    f"{self.strategy!r}, where only {needed!r} has one: delete the one that is wrong."
                )

    def refuse(self, key: str, value: Any) -> UnsupportedModel:
        """Returns the error that a key has this value."""
        return UnsupportedModel(f"The model's config.json has '{self.path}.{key}' {value!r}, which is not supported.")
