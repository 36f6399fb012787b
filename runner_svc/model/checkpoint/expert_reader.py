"""Reads a layer's experts from a checkpoint, into stacked tensors.

A checkpoint holds a tensor for each expert and matrix, or one for all experts, as transformers 5 holds them in memory.
Each expert's tensors are copied to their place as they are read, so that no second copy of the layer exists.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
from torch import Tensor

from runner_svc.model.checkpoint.expected_experts import block_name, corrections_name, is_whole
from runner_svc.model.checkpoint.quantized_matrices import MatrixReader
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.model.families.tensor_names import ExpertNames
from runner_svc.model.rank_parts import RankParts
from runner_svc.weights.expert_matrices import ExpertMatrices
from runner_svc.weights.expert_weights import ExpertWeights, SharedExpertWeights
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.matrix import Matrix, joined
from runner_svc.weights.matrix_part import MatrixPart, Region
from runner_svc.weights.plain_matrix import PlainMatrix


class ExpertReader:
    """Reads the experts of one layer, or a rank's part of each."""

    def __init__(
        self,
        config: ExpertsConfig,
        hidden_size: int,
        names: ExpertNames,
        read: Callable[..., Tensor],
        tensors: Container[str],
        read_exact: Callable[..., Tensor] | None = None,
        quantized: MatrixReader | None = None,
        parts: RankParts | None = None,
    ) -> None:
        """`read` returns the tensor of a name, in the type and on the device that are wanted; `tensors`: all names.

        `read_exact` returns it in the type that it is stored in, and `quantized` the matrix of a module that is
        quantized: of all experts, beneath each other, where a tensor has all. None: nothing is. `config` is the whole
        model's, and `parts` says what a rank has of it; None: all.
        """
        self._quantized = quantized
        self._config = config
        self._is_whole, self._is_first = (True, True) if parts is None else (parts.is_whole, parts.is_first)
        self._inner = slice(0, config.width) if parts is None else parts.width(config.width)
        self._width: int = self._inner.stop - self._inner.start
        shared = config.shared_width or 0
        self._shared_inner = slice(0, shared) if parts is None or not shared else parts.width(shared)
        self._hidden = hidden_size
        self._names = names
        self._read = read
        self._read_exact = read_exact or read
        self._tensors = tensors

    def layer(self, prefix: str) -> ExpertWeights:
        """Returns the experts of the layer whose tensors' names begin so.

        Raises UnsupportedModel for a tensor that is missing or has another shape.
        """
        config = self._config
        block = block_name(prefix, self._names, self._tensors)
        experts = f"{block}.experts"
        router = f"{block}.{self._names.router}"
        gate_up, down = self._whole(experts) if is_whole(experts, self._tensors) else self._stacked(experts)
        return ExpertWeights(
            router=LinearWeights.plain(
                self._router(f"{router}.weight"),
                self._tensor(f"{router}.bias", config.num_experts) if config.bias else None,
            ),
            gate_up=gate_up,
            gate_up_bias=self._gate_up_bias(experts) if config.bias else None,
            down=down,
            down_bias=self._down_bias(experts) if config.bias and self._is_first else None,
            corrections=self._corrections(block) if config.router.is_corrected else None,
            shared=self._shared(block) if config.shared_width is not None else None,
        )

    def _tensor(self, name: str, *shape: int, exact: bool = False, places: Sequence[slice | None] = ()) -> Tensor:
        """Returns what is at the `places` of the first dimensions, of that shape; all where this rank has all."""
        slices = () if self._is_whole else tuple(each or slice(None) for each in places)
        tensor = (self._read_exact if exact else self._read)(name, *slices)
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

    def _format(self, module: str, shape: tuple[int, int], region: Region) -> Matrix:
        """Returns the region of a module's matrix, of that shape, in the format that it is stored in."""
        matrix = self._read_quantized(module, region) if self._quantized is not None else None
        if matrix is not None:
            return matrix
        return PlainMatrix(self._tensor(f"{module}.weight", *shape, places=(region.rows, region.columns)))

    def _read_quantized(self, module: str, region: Region) -> Matrix | None:
        if self._quantized is None:
            return None
        if self._is_whole:
            return self._quantized(module)
        return self._quantized(module, MatrixPart((region.rows,) if region.rows is not None else None, region.columns))

    def _stacked(self, experts: str) -> tuple[ExpertMatrices, ExpertMatrices]:
        """From tensors for each expert and matrix."""
        if self._quantized is None:
            return self._stacked_plain(experts)
        width, hidden, names = self._width, self._hidden, self._names
        rows, columns = Region(rows=self._inner), Region(columns=self._inner)
        gate_up, down = [], []
        for index in range(self._config.num_experts):
            expert = f"{experts}.{index}"
            pair = [self._format(f"{expert}.{name}", (width, hidden), rows) for name in (names.gate, names.up)]
            gate_up.append(joined(pair))
            down.append(self._format(f"{expert}.{names.down}", (hidden, width), columns))
        return ExpertMatrices.of_each(gate_up), ExpertMatrices.of_each(down)

    def _stacked_plain(self, experts: str) -> tuple[ExpertMatrices, ExpertMatrices]:
        """Copies each expert to its place as it is read."""
        count, width, hidden, names = self._config.num_experts, self._width, self._hidden, self._names
        gate_up: Tensor | None = None
        down: Tensor | None = None
        for index in range(count):
            gate, up = (
                self._tensor(f"{experts}.{index}.{name}.weight", width, hidden, places=(self._inner,))
                for name in (names.gate, names.up)
            )
            lower = self._tensor(f"{experts}.{index}.{names.down}.weight", hidden, width, places=(None, self._inner))
            if gate_up is None or down is None:
                gate_up, down = gate.new_empty(count, 2 * width, hidden), lower.new_empty(count, hidden, width)
            gate_up[index, :width], gate_up[index, width:], down[index] = gate, up, lower
        assert gate_up is not None and down is not None, "there is at least one expert"
        return ExpertMatrices.plain(gate_up), ExpertMatrices.plain(down)

    def _whole(self, experts: str) -> tuple[ExpertMatrices, ExpertMatrices]:
        """From tensors of all experts."""
        return self._gate_up(f"{experts}.gate_up_proj"), self._down(f"{experts}.down_proj")

    def _gate_up(self, module: str) -> ExpertMatrices:
        places, is_mixed = self._gate_up_places(), self._names.interleaved
        stacks = [self._stack(module, Region(rows=rows)) for rows in places]
        found = [stack for stack in stacks if stack is not None]
        if found:
            if is_mixed:
                return found[0].reordered(torch.arange(2 * self._width).unflatten(0, (-1, 2)).t().flatten())
            pairs = zip(*(stack.matrices for stack in found), strict=True)
            return found[0] if len(found) == 1 else ExpertMatrices.of_each([joined(list(pair)) for pair in pairs])
        size = 2 * self._width // len(places)
        plain = [self._plain_stack(module, (size, self._hidden), Region(rows=rows)) for rows in places]
        whole = plain[0] if len(plain) == 1 else torch.cat(plain, dim=1)
        return ExpertMatrices.plain(_split_pairs(whole, self._width) if is_mixed else whole)

    def _gate_up_places(self) -> list[slice | None]:
        """Returns the rank's rows of a tensor that has gate and up."""
        begin, end = self._inner.start, self._inner.stop
        if self._is_whole:
            return [None]
        if self._names.interleaved:
            return [slice(2 * begin, 2 * end)]
        return [self._inner, slice(self._config.width + begin, self._config.width + end)]

    def _down(self, module: str) -> ExpertMatrices:
        region = Region(columns=self._inner)
        stack = self._stack(module, region)
        if stack is not None:
            return stack
        return ExpertMatrices.plain(self._plain_stack(module, (self._hidden, self._width), region).contiguous())

    def _stack(self, module: str, region: Region) -> ExpertMatrices | None:
        whole = self._read_quantized(module, region)
        return ExpertMatrices.of_rows(whole, self._config.num_experts) if whole is not None else None

    def _plain_stack(self, name: str, shape: tuple[int, int], region: Region) -> Tensor:
        """Returns [experts, rows, columns]."""
        count, places = self._config.num_experts, (region.rows, region.columns)
        if self._names.interleaved:
            return self._tensor(name, count, *shape[::-1], places=(None, *places[::-1])).transpose(1, 2)
        return self._tensor(name, count, *shape, places=(None, *places))

    def _gate_up_bias(self, experts: str) -> Tensor:
        places = self._gate_up_places()
        count, size = self._config.num_experts, 2 * self._width // len(places)
        name = f"{experts}.gate_up_proj_bias"
        bias = torch.cat([self._tensor(name, count, size, places=(None, rows)) for rows in places], dim=1)
        return _split_pairs(bias, self._width) if self._names.interleaved else bias

    def _down_bias(self, experts: str) -> Tensor:
        """Returns the bias that the ranks' sum has once."""
        return self._tensor(f"{experts}.down_proj_bias", self._config.num_experts, self._hidden)

    def _shared(self, block: str) -> SharedExpertWeights:
        inner, hidden = self._shared_inner, self._hidden
        expert, width = f"{block}.{self._names.shared}", inner.stop - inner.start
        rows, columns = Region(rows=inner), Region(columns=inner)
        parts = [self._format(f"{expert}.{name}", (width, hidden), rows) for name in ("gate_proj", "up_proj")]
        return SharedExpertWeights(
            gate_up=LinearWeights(joined(parts)),
            down=LinearWeights(self._format(f"{expert}.down_proj", (hidden, width), columns)),
            gate=self._tensor(f"{expert}_gate.weight", 1, hidden) if self._config.shared_gate else None,
        )


def _split_pairs(rows: Tensor, width: int) -> Tensor:
    """Returns [experts, 2 * width, ...] with the even ones of dimension 1 before the odd ones, contiguous."""
    split = rows.new_empty(rows.shape)
    split[:, :width], split[:, width:] = rows[:, ::2], rows[:, 1::2]
    return split
