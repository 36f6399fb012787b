"""Which part of a model each rank of a group holds, after Megatron; needs no torch.

Heads are divided evenly. Keys' heads fewer than ranks are held by several ranks each. Widths of MLPs and experts are
divided at groups of a quantization where there are enough of them. All ranks have the same width: where that of the
whole has no equal parts, zeros are behind those of the last ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from runner_svc.interface.ranks import Shard
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.families.description import LayerDescription, MlpDescription
from runner_svc.weights.matrix_part import MatrixPart

_WIDTH_UNIT = 16
"""Of widths that the ranks don't divide, or that have fewer groups than there are ranks."""


@dataclass(frozen=True, slots=True)
class RankParts:
    """The parts of one rank: heads, rows and columns of the whole model's."""

    whole: ModelConfig
    shard: Shard

    @property
    def is_whole(self) -> bool:
        """Whether there is one rank."""
        return self.shard.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this rank adds the biases of products that the ranks sum."""
        return self.shard.rank == 0

    @property
    def heads(self) -> slice:
        """Heads of queries."""
        return self.shard.part(self.whole.num_heads)

    @property
    def kv_heads(self) -> slice:
        """Heads of keys and values: those that `heads` attend to."""
        heads, whole = self.shard, self.whole.num_kv_heads
        if whole >= heads.size:
            return heads.part(whole)
        head = heads.rank * whole // heads.size
        return slice(head, head + 1)

    @property
    def vocabulary(self) -> slice:
        """Rows of embeddings and head, without the zeros that may be behind them; see `ModelConfig.vocabulary`."""
        padded = replace(self.whole, shard=self.shard).vocabulary
        return slice(padded.start, min(padded.stop, self.whole.vocab_size))

    @property
    def queries(self) -> slice:
        """Rows of queries, and columns of the output product."""
        return _times(self.heads, self.whole.head_dim)

    @property
    def keys(self) -> slice:
        """Rows of keys, or of values."""
        return _times(self.kv_heads, self.whole.head_dim)

    def width(self, whole: int) -> slice:
        """Returns the part of an MLP or expert of that width. Raises UnsupportedModel for too narrow ones."""
        return width_part(whole, self.shard, _unit(self.whole))[0]

    def padded_width(self, whole: int) -> int:
        """Returns the width that each rank has of an MLP or expert of that width, with zeros behind its own part."""
        return width_part(whole, self.shard, _unit(self.whole))[1]

    def qkv(self, modules: int) -> tuple[MatrixPart, ...]:
        """Returns the part of each module: of three, or of the one that is all of them."""
        queries, keys = self.whole.num_heads * self.whole.head_dim, self.whole.num_kv_heads * self.whole.head_dim
        return _of_modules((self.queries, self.keys, self.keys), (queries, keys, keys), modules)

    def gate_up(self, mlp: MlpDescription, modules: int) -> tuple[MatrixPart, ...]:
        """Returns the part of each module: of gate and up, of the one that is both, or of up alone."""
        count = 1 + mlp.gated
        return _of_modules((self.width(mlp.width),) * count, (mlp.width,) * count, modules)

    def local(self) -> ModelConfig:
        """Returns the configuration of the rank's part: its heads and widths; the vocabulary's size is the whole's.

        Raises UnsupportedModel for a model that can't be divided so.
        """
        if self.is_whole:
            return self.whole
        config, size = self.whole, self.shard.size
        if config.num_heads % size:
            raise UnsupportedModel(
                f"{config.num_heads} attention heads can't be divided among {size} ranks: set tensor_parallel to a "
                f"divisor of {config.num_heads}."
            )
        if config.num_kv_heads % size and size % config.num_kv_heads:
            raise UnsupportedModel(
                f"{config.num_kv_heads} key-value heads can't be divided among {size} ranks, nor these among the "
                f"heads: set tensor_parallel to a divisor or a multiple of {config.num_kv_heads}."
            )
        if replace(config, shard=Shard(size - 1, size)).vocabulary.start >= config.vocab_size:
            raise UnsupportedModel(f"A vocabulary of {config.vocab_size} can't be divided among {size} ranks.")
        return replace(
            config,
            num_heads=config.num_heads // size,
            num_kv_heads=max(config.num_kv_heads // size, 1),
            layers=tuple(self._layer(layer) for layer in config.layers),
            shard=self.shard,
            kv_replicas=max(size // config.num_kv_heads, 1),
        )

    def _layer(self, layer: LayerDescription) -> LayerDescription:
        if isinstance(layer.mlp, MlpDescription):
            return replace(layer, mlp=replace(layer.mlp, width=self.padded_width(layer.mlp.width)))
        width, shared = self.padded_width(layer.mlp.width), layer.mlp.shared_width
        own = self.padded_width(shared) if shared is not None else None
        return replace(layer, mlp=replace(layer.mlp, width=width, shared_width=own))


def local_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Returns what a rank computes of a model; see `RankParts.local`."""
    return RankParts(config, shard).local()


def width_part(width: int, shard: Shard, unit: int) -> tuple[slice, int]:
    """Returns a rank's columns of `width`, and how many each rank has with zeros behind its own.

    They are whole units if there are enough. Raises UnsupportedModel for fewer columns than all ranks need.
    """
    if width % (unit * shard.size):
        units = (math.lcm(unit, _WIDTH_UNIT), unit, _WIDTH_UNIT, 1)
        unit = next((each for each in units if _each(width, shard.size, each) * (shard.size - 1) < width), 0)
        if unit == 0:
            raise UnsupportedModel(
                f"An MLP of {width} columns can't be divided among {shard.size} ranks: set tensor_parallel to less."
            )
    each = _each(width, shard.size, unit)
    return slice(shard.rank * each, min((shard.rank + 1) * each, width)), each


def _each(width: int, size: int, unit: int) -> int:
    return -(-width // (unit * size)) * unit


def _unit(config: ModelConfig) -> int:
    """Returns at which multiples of columns all formats of a checkpoint can be cut."""
    rules = config.quantization.rules if config.quantization is not None else ()
    return math.lcm(*(rule.format.unit for rule in rules))


def _of_modules(own: tuple[slice, ...], whole: tuple[int, ...], modules: int) -> tuple[MatrixPart, ...]:
    if modules == len(own):
        return tuple(MatrixPart((rows,)) for rows in own)
    begins = [sum(whole[:index]) for index in range(len(whole))]
    rows = (slice(begin + each.start, begin + each.stop) for begin, each in zip(begins, own, strict=True))
    return (MatrixPart(tuple(rows)),)


def _times(places: slice, factor: int) -> slice:
    return slice(places.start * factor, places.stop * factor)
