"""Reads the `quantization_config` of a converted GGUF model, which `runner_svc.gguf.kept_blocks` writes."""

from __future__ import annotations

from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.quantization.config_reader import QuantizationKeys
from runner_svc.model.quantization.selection import Quantization, Rule, Targets
from runner_svc.model.quantization.stored_gguf import BLOCKS, StoredGguf

VERSION = 1


def read_gguf(keys: QuantizationKeys) -> Quantization:
    """gguf-blocks: the modules of each type of blocks, by name."""
    keys.only("version", VERSION)
    modules = keys.take("modules", dict)
    keys.finish()
    listed = QuantizationKeys(modules, keys.path("modules"))
    rules = []
    for kind in modules:
        if kind not in BLOCKS:
            raise UnsupportedModel(
                f"The model's config.json has {listed.path(str(kind))!r}, which is not supported; supported: "
                f"{', '.join(BLOCKS)}."
            )
        rules.append(Rule(Targets(listed.names(kind)), StoredGguf(kind)))
    return Quantization("gguf-blocks", tuple(rules), ())
