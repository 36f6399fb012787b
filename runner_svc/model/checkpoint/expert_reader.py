"""Reads a layer's experts from a checkpoint, into stacked tensors.

A checkpoint holds a tensor for each expert and matrix, or one for all experts, as transformers 5 holds them in memory.
Each expert's tensors are copied to their place as they are read, so that no second copy of the layer exists.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import Tensor

from runner_svc.model.checkpoint.expected_experts import block_name, corrections_name
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.model.families.tensor_names import ExpertNames
from runner_svc.weights.expert_weights import ExpertWeights, SharedExpertWeights
from runner_svc.weights.linear_weights import LinearWeights


class ExpertReader:
    """Reads the experts of one layer."""

    def __init__(
        self,
        config: ExpertsConfig,
        hidden_size: int,
        names: ExpertNames,
        read: Callable[[str], Tensor],
        tensors: Container[str],
        read_exact: Callable[[str], Tensor] | None = None,
    ) -> None:
        """`read` returns the tensor of a name, in the type and on the device that are wanted; `tensors`: all names.

        `read_exact` returns it in the type that it is stored in.
        """
        self._config = config
        self._hidden = hidden_size
        self._names = names
        self._read = read
        self._read_exact = read_exact or read
        self._tensors = tensors

    def layer(self, prefix: str) -> ExpertWeights:
        """Returns the experts of the layer whose tensors' names begin so.

        Raises UnsupportedModel for a tensor that is missing, has another shape, or is in MXFP4.
        """
        config = self._config
        block = block_name(prefix, self._names, self._tensors)
        experts = f"{block}.experts"
        if f"{experts}.gate_up_proj_blocks" in self._tensors:
            raise UnsupportedModel(
                f"{experts}.gate_up_proj_blocks is in MXFP4, which is not supported: convert the model to bfloat16."
            )
        router = f"{block}.{self._names.router}"
        is_whole = f"{experts}.gate_up_proj" in self._tensors
        gate_up, down = self._whole(experts) if is_whole else self._stacked(experts)
        return ExpertWeights(
            router=LinearWeights.plain(
                self._router(f"{router}.weight"),
                self._tensor(f"{router}.bias", config.num_experts) if config.bias else None,
            ),
            gate_up=gate_up,
            gate_up_bias=self._gate_up_bias(experts) if config.bias else None,
            down=down,
            down_bias=self._tensor(f"{experts}.down_proj_bias", config.num_experts, self._hidden)
            if config.bias
            else None,
            corrections=self._corrections(block) if config.router.is_corrected else None,
            shared=self._shared(block) if config.shared_width is not None else None,
        )

    def _tensor(self, name: str, *shape: int, exact: bool = False) -> Tensor:
        tensor = (self._read_exact if exact else self._read)(name)
        if tensor.shape != shape:
            raise UnsupportedModel(
                f"The checkpoint's {name} is {list(tensor.shape)}, but by its config.json it should be {list(shape)}."
            )
        return tensor

    def _router(self, name: str) -> Tensor:
        """Returns the matrix in float32 where it has to be exact and isn't in the type that is wanted."""
        shape = self._config.num_experts, self._hidden
        matrix = self._tensor(name, *shape)
        if not self._config.router.is_exact:
            return matrix
        exact = self._tensor(name, *shape, exact=True).float()
        return matrix if torch.equal(matrix.float(), exact) else exact

    def _corrections(self, block: str) -> Tensor:
        shape = (1,) * self._names.has_wide_corrections + (self._config.num_experts,)
        name = corrections_name(block, self._names, self._tensors)
        return self._tensor(name, *shape, exact=True).float().flatten()

    def _stacked(self, experts: str) -> tuple[Tensor, Tensor]:
        """From a tensor for each expert and matrix."""
        count, width, hidden, names = self._config.num_experts, self._config.width, self._hidden, self._names
        gate_up: Tensor | None = None
        down: Tensor | None = None
        for index in range(count):
            parts = (("gate", names.gate), ("up", names.up))
            gate, up = (self._tensor(f"{experts}.{index}.{name}.weight", width, hidden) for _, name in parts)
            lower = self._tensor(f"{experts}.{index}.{names.down}.weight", hidden, width)
            if gate_up is None or down is None:
                gate_up, down = gate.new_empty(count, 2 * width, hidden), lower.new_empty(count, hidden, width)
            gate_up[index, :width], gate_up[index, width:], down[index] = gate, up, lower
        assert gate_up is not None and down is not None, "there is at least one expert"
        return gate_up, down

    def _whole(self, experts: str) -> tuple[Tensor, Tensor]:
        """From one tensor for each matrix."""
        count, width, hidden = self._config.num_experts, self._config.width, self._hidden
        if not self._names.interleaved:
            return (
                self._tensor(f"{experts}.gate_up_proj", count, 2 * width, hidden),
                self._tensor(f"{experts}.down_proj", count, hidden, width),
            )
        gate_up = _split_pairs(self._tensor(f"{experts}.gate_up_proj", count, hidden, 2 * width).transpose(1, 2), width)
        return gate_up, self._tensor(f"{experts}.down_proj", count, width, hidden).transpose(1, 2).contiguous()

    def _gate_up_bias(self, experts: str) -> Tensor:
        bias = self._tensor(f"{experts}.gate_up_proj_bias", self._config.num_experts, 2 * self._config.width)
        return _split_pairs(bias, self._config.width) if self._names.interleaved else bias

    def _shared(self, block: str) -> SharedExpertWeights:
        width, hidden = self._config.shared_width, self._hidden
        assert width is not None, "the configuration has a shared expert"
        expert = f"{block}.{self._names.shared}"
        parts = [self._tensor(f"{expert}.{name}.weight", width, hidden) for name in ("gate_proj", "up_proj")]
        return SharedExpertWeights(
            gate_up=LinearWeights.plain(torch.cat(parts)),
            down=LinearWeights.plain(self._tensor(f"{expert}.down_proj.weight", hidden, width)),
            gate=self._tensor(f"{expert}_gate.weight", 1, hidden) if self._config.shared_gate else None,
        )


def _split_pairs(rows: Tensor, width: int) -> Tensor:
    """Returns [experts, 2 * width, ...] with the even ones of dimension 1 before the odd ones, contiguous."""
    split = rows.new_empty(rows.shape)
    split[:, :width], split[:, width:] = rows[:, ::2], rows[:, 1::2]
    return split
