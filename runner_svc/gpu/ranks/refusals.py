"""What several ranks can't do on GPUs yet, each with a sentence for the operator: the table of docs/parallel.md."""

from __future__ import annotations

from typing import Protocol

from roster_common.setting_sources import UnusableSettings
from runner_svc.cuda.experts.expert_variant import STEP
from runner_svc.interface.ranks import Shard
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.families.description import QkNorm
from runner_svc.model.rank_parts import local_config


class RefusedOptions(Protocol):
    """The options that are looked at; implemented by `runner_svc.gpu.loading.GpuOptions`."""

    @property
    def draft(self) -> str: ...

    @property
    def shares_cache(self) -> bool: ...

    @property
    def deterministic(self) -> bool: ...

    @property
    def one_shot(self) -> bool: ...


def refuse_on_gpus(config: ModelConfig, shard: Shard, options: RefusedOptions) -> None:
    """Raises UnusableSettings or UnsupportedModel for what several ranks can't do; nothing is refused for one."""
    if shard.size == 1:
        return
    if options.draft:
        raise UnusableSettings(
            f"draft is {options.draft!r}, which several ranks can't do on GPUs: set draft to '', or tensor_parallel "
            "to 1"
        )
    if options.shares_cache:
        raise UnusableSettings(
            "move_listen is set, but KV that several ranks hold can't be moved: set move_listen to '', or "
            "tensor_parallel to 1"
        )
    if options.deterministic and not options.one_shot:
        raise UnusableSettings(
            "deterministic is true, but NCCL adds up in an order that depends on the batch: set all_reduce to "
            "'one-shot', or deterministic to false"
        )
    _refuse_model(config, shard)


def _refuse_model(config: ModelConfig, shard: Shard) -> None:
    if config.layers[0].qk_norm is QkNorm.PROJECTION:
        raise UnsupportedModel(
            f"{config.architecture} norms all heads' queries together, which GPUs can't divide among ranks: set "
            "tensor_parallel to 1, or device to 'cpu'."
        )
    experts = local_config(config, shard).experts
    if experts is not None and experts.width % STEP:
        whole = config.experts.width if config.experts is not None else 0
        raise UnsupportedModel(
            f"Experts of {whole} columns have parts of {experts.width} on {shard.size} ranks, and GPUs need multiples "
            f"of {STEP}: set tensor_parallel to less."
        )
