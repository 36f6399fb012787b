"""Sizes the KV pool: the usable share of the GPU's memory, less the memory that a profiling forward pass takes."""

from __future__ import annotations

from dataclasses import dataclass

# Reserved for CUDA graphs (nodes, and the activations of the largest), which are captured after the pool exists.
GRAPH_BYTES = 512 << 20


class OutOfMemory(RuntimeError):
    """The model does not fit into the GPU's memory; the message says what to change."""


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Memory of one GPU during the largest step, in bytes."""

    total: int
    # Peak of the largest step: weights, buffers, activations.
    peak: int
    # Used by the driver's context, libraries' workspaces and other processes.
    other: int

    def num_blocks(self, share: float, block_bytes: int) -> int:
        """Returns the number of KV blocks of `block_bytes` that fit into `share` (0 to 1) of the GPU's memory.

        Raises OutOfMemory if not even one block fits.
        """
        room = int(self.total * share) - self.peak - self.other - GRAPH_BYTES
        if room < block_bytes:
            raise OutOfMemory(
                f"no GPU memory is left for KV: of {_gib(self.total)}, gpu_memory allows {share:.0%}; weights and the "
                f"largest step take {_gib(self.peak)}, the driver and other processes {_gib(self.other)}, CUDA graphs "
                f"{_gib(GRAPH_BYTES)}. Use a smaller model, lower max_step_tokens, slots or context_length, "
                "or raise gpu_memory"
            )
        return room // block_bytes


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
