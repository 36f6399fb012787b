"""How many KV blocks fit: what a profiling forward pass leaves of the share of the GPU's memory that may be used."""

from __future__ import annotations

from dataclasses import dataclass

# For CUDA graphs (nodes and the activations of the largest), which are captured after the pool exists.
GRAPH_BYTES = 512 << 20


class OutOfMemory(RuntimeError):
    """The model does not fit the GPU; the text says what to change."""


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes of one GPU around the largest step."""

    total: int
    # What the largest step needed at its peak: weights, buffers, activations.
    peak: int
    # What others hold: the driver's context, libraries' workspaces, other processes.
    other: int

    def num_blocks(self, share: float, block_bytes: int) -> int:
        """KV blocks of `block_bytes` for which there is room in `share` (0 to 1) of the GPU's memory.

        Raises OutOfMemory when there is none for a single block.
        """
        room = int(self.total * share) - self.peak - self.other - GRAPH_BYTES
        if room < block_bytes:
            raise OutOfMemory(
                f"the GPU has {_gib(self.total)}, of which gpu_memory allows {share:.0%}; weights and the largest step "
                f"take {_gib(self.peak)}, other users and the driver {_gib(self.other)}, graphs {_gib(GRAPH_BYTES)}: "
                "nothing is left for KV. Use a smaller model, lower max_step_tokens, slots or context_length, "
                "or raise gpu_memory"
            )
        return room // block_bytes


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
