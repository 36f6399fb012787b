"""Which tensors a checkpoint has of a layer's experts, in either of the two layouts; needs no torch."""

from __future__ import annotations

from collections.abc import Container, Iterator

from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.model.families.tensor_names import ExpertNames

Shape = tuple[int, ...]


def expected_experts(
    prefix: str, experts: ExpertsConfig, hidden: int, names: ExpertNames, tensors: Container[str]
) -> Iterator[tuple[str, Shape]]:
    """Yields name and shape of each tensor of the layer whose names begin with `prefix`.

    `tensors` decides between the layouts. Those of experts in MXFP4 are the plain tensors that they stand for.
    """
    block = block_name(prefix, names, tensors)
    below = f"{block}.experts"
    count = experts.num_experts
    yield f"{block}.{names.router}.weight", (count, hidden)
    if experts.bias:
        yield f"{block}.{names.router}.bias", (count,)
    if experts.router.is_corrected:
        name = corrections_name(block, names, tensors)
        yield name, (1, count) if names.has_wide_corrections else (count,)
    if is_whole(below, tensors):
        yield from _whole(below, experts, hidden, names)
    else:
        yield from _one_by_one(below, experts, hidden, names)
    if experts.bias:
        yield f"{below}.gate_up_proj_bias", (count, 2 * experts.width)
        yield f"{below}.down_proj_bias", (count, hidden)
    if experts.shared_width is not None:
        for name in ("gate_proj", "up_proj"):
            yield f"{block}.{names.shared}.{name}.weight", (experts.shared_width, hidden)
        yield f"{block}.{names.shared}.down_proj.weight", (hidden, experts.shared_width)
        if experts.shared_gate:
            yield f"{block}.{names.shared}_gate.weight", (1, hidden)


def is_whole(experts: str, tensors: Container[str]) -> bool:
    """Returns whether a tensor holds the matrices of all experts; `experts` is what their names begin with."""
    return f"{experts}.gate_up_proj" in tensors or f"{experts}.gate_up_proj_blocks" in tensors


def block_name(prefix: str, names: ExpertNames, tensors: Container[str]) -> str:
    """Returns what the names of a layer's router and experts begin with: the first that the checkpoint has."""
    blocks = [f"{prefix}.{block}" for block in names.blocks]
    return next((block for block in blocks if f"{block}.{names.router}.weight" in tensors), blocks[0])


def corrections_name(block: str, names: ExpertNames, tensors: Container[str]) -> str:
    """Returns the name of the router's corrections: the first that the checkpoint has."""
    found = [f"{block}.{name}" for name in names.corrections]
    return next((name for name in found if name in tensors), found[0])


def _whole(below: str, experts: ExpertsConfig, hidden: int, names: ExpertNames) -> Iterator[tuple[str, Shape]]:
    count, width = experts.num_experts, experts.width
    in_first = names.interleaved
    yield f"{below}.gate_up_proj", (count, hidden, 2 * width) if in_first else (count, 2 * width, hidden)
    yield f"{below}.down_proj", (count, width, hidden) if in_first else (count, hidden, width)


def _one_by_one(below: str, experts: ExpertsConfig, hidden: int, names: ExpertNames) -> Iterator[tuple[str, Shape]]:
    for index in range(experts.num_experts):
        yield f"{below}.{index}.{names.gate}.weight", (experts.width, hidden)
        yield f"{below}.{index}.{names.up}.weight", (experts.width, hidden)
        yield f"{below}.{index}.{names.down}.weight", (hidden, experts.width)
