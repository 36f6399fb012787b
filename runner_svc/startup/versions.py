"""What `roster-runner --version` prints: Roster's version, torch, CUDA and the card."""

from __future__ import annotations

import warnings

from roster_common.distribution import version_line


def versions() -> str:
    """Returns a line each; what is missing is said instead of raised."""
    return "\n".join([version_line("roster-runner"), *_libraries()])


def _libraries() -> list[str]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that torch loads
        return [f"torch: none ({str(error).splitlines()[0]})"]
    cuda = torch.version.cuda
    lines = [f"torch {torch.__version__}", f"CUDA {cuda}" if cuda else "CUDA: none (torch is built without it)"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cards = [_card(index) for index in range(torch.cuda.device_count())] if cuda else []
    return [*lines, *(cards or ["GPU: none"])]


def _card(index: int) -> str:
    import torch

    try:
        card = torch.cuda.get_device_properties(index)
    except (RuntimeError, AssertionError) as error:
        return f"GPU {index}: unusable ({str(error).splitlines()[0]})"
    return (
        f"GPU {index}: {card.name}, {card.total_memory / 2**30:.0f} GiB, compute capability {card.major}.{card.minor}"
    )
