"""What a forward pass on a GPU launches, by family: a family that needs less than another must not pay for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runner_svc.cuda.products.by_class import LinearProducts
from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.decoder.fusions import Adding, Fusions
from runner_svc.decoder.step_rotations import StepRows
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.layer_launchers import DecoderLaunchers
from runner_svc.model.checkpoint.weights import load_weights
from runner_svc.model.config import ModelConfig
from runner_svc.model.folder.config_file import read_config
from runner_svc.weights.matrix import Matrix
from tests.support.host_backend import no_progress
from tests.support.tiny_models import make_tiny_model

CPU = torch.device("cpu")
VIEWS = {"slice", "t", "select", "view", "detach", "alias", "transpose", "expand", "unbind", "split"}


class CountedOperations(TorchDispatchMode):
    """Counts torch's operations by name, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class CountedLauncher:
    """Counts calls of itself and of its methods by name, and does nothing else."""

    def __init__(self, name: str, counts: Counter[str]) -> None:
        self._name, self._counts = name, counts

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self._counts[self._name] += 1

    def __getattr__(self, name: str) -> CountedLauncher:
        return CountedLauncher(f"{self._name}.{name}", self._counts)


class CountedSplits:
    """Counts the products whose blocks share tiles, and computes nothing."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def adds(self, matrix: Matrix) -> bool:
        return True

    def fits(self, matrix: Matrix, rows: int) -> bool:
        return True

    def takes(self, matrix: Matrix, rows: int) -> None:
        """Returns None."""

    def multiply(self, *arguments: Any) -> None:
        self._counts["split.multiply"] += 1

    def add(self, *arguments: Any) -> None:
        self._counts["split.add"] += 1


def launches(folder: Path, fusions: Fusions) -> Counter[str]:
    config = ModelConfig.from_hugging_face(read_config(folder))
    counts: Counter[str] = Counter()

    def launcher(name: str) -> Any:
        return CountedLauncher(name, counts)

    rotating = [launcher("rope") for _ in config.ropes]
    launchers = DecoderLaunchers(
        launcher("norm"),
        launcher("activation"),
        LinearProducts({}),
        None,
        rotating,
        launcher("plain"),
        splitting=CountedSplits(counts),
    )
    weights = load_weights(folder, config, torch.float32, CPU, no_progress)
    decoder = CudaDecoder(config, weights, launchers, 4)
    cache = KVCache(config, 2, 8, torch.float32, CPU)
    tokens, positions, slots = torch.zeros(3, 2, dtype=torch.int32).unbind()
    rows = StepRows(torch.tensor([0, 1, 2], dtype=torch.int32), torch.ones(2, dtype=torch.int32))
    out = torch.empty(2, config.vocab_size)
    with torch.no_grad(), CountedOperations() as operations:
        inputs = decoder.inputs(tokens, positions, slots, rows)
        hidden = decoder.forward(0, inputs, cache, launcher("attention"), fusions)
        decoder.logits(0, hidden, out)
    return counts + operations.counts


def plain(layers: int) -> dict[str, int]:
    """Returns the launches of a model like Llama where the norms add."""
    return {
        "index_select": 1,
        "norm.norm": 1,
        "mm": 4 * layers + 1,
        "rope": layers,
        "attention": layers,
        "norm.add": 2 * layers,
        "activation": layers,
        "empty_like": 1,  # the last norm's output
    }


def with_biases(layers: int) -> dict[str, int]:
    return {"mm": 1, "addmm": 4 * layers}


@pytest.mark.parametrize(
    ("family", "others"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("mistral", {}),
        ("granite", {**with_biases(3), "mul_": 2}),  # of embeddings and of logits
        ("gemma3", {"norm.add": 0, "norm.add_normed": 6, "mul_": 1}),
        ("gemma2", {"norm.add": 0, "norm.add_normed": 6, "mul_": 2, "div_": 1, "tanh_": 1}),
        ("olmo2", {"norm.norm": 0, "norm.add": 0, "norm.add_normed": 6}),
        ("cohere", {"norm.add": 3, "mm": 10, "addmm_": 3, "mul_": 1}),
        ("gpt2", {**with_biases(3), "index_select": 2, "add_": 1, "rope": 0, "plain": 3}),
    ],
)
def test_a_pass_launches_what_its_description_needs(family: str, others: dict[str, int], tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path / family)
    assert launches(folder, Fusions()) == Counter({**plain(3), **others})


def test_products_that_add_save_no_launch_but_bytes(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "llama")
    expected = {**plain(3), "norm.add": 0, "norm.norm": 7, "mm": 7, "addmm_": 6}
    assert launches(folder, Fusions(Adding.PRODUCTS)) == Counter(expected)


def test_products_whose_blocks_share_tiles_are_those_of_qkv_output_and_down(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "llama")
    expected = {**plain(3), "mm": 4, "split.multiply": 9}
    assert launches(folder, Fusions(splitting=True)) == Counter(expected)
    added = launches(folder, Fusions(Adding.PRODUCTS, splitting=True))
    assert (added["mm"], added["split.multiply"], added["split.add"]) == (4, 3, 6)
