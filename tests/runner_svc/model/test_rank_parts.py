"""The parts of a model that ranks read are the whole's numbers, each once but for what all need; nothing else is read.

Parts are compared as plain numbers, whatever format they are in.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
import torch
from torch import Tensor

from runner_svc.interface.ranks import Shard
from runner_svc.model.checkpoint.random_weights import random_weights
from runner_svc.model.checkpoint.runs import Runs
from runner_svc.model.checkpoint.staged_reader import StagedReader
from runner_svc.model.checkpoint.weights import Checkpoint, load_weights
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.model.folder.config_file import read_config
from runner_svc.model.rank_parts import RankParts, local_config, width_part
from runner_svc.weights.model_weights import ModelWeights
from runner_svc.weights.on_load import OnLoad
from tests.support.assembled_parts import assert_disjoint, assert_same, numbers_of
from tests.support.host_backend import no_progress
from tests.support.thoroughness import choice, in_turn
from tests.support.tiny_models import FAMILIES, make_tiny_model
from tests.support.tiny_mxfp4 import make_tiny_mxfp4
from tests.support.tiny_quantized import KINDS, make_tiny_quantized

CPU = torch.device("cpu")
IN_CI = ("llama", "llama-biases", "phi3-partial", "olmo2", "cohere-qk-norm", "gpt2", "gpt-oss", "glm4-moe", "glm4")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig.from_hugging_face(read_config(folder))


def sizes_of(config: ModelConfig) -> list[int]:
    """Returns numbers of ranks that can have the model."""
    heads, keys = config.num_heads, config.num_kv_heads
    return [size for size in (2, 3, 4) if heads % size == 0 and (keys % size == 0 or size % keys == 0)]


def check_parts(config: ModelConfig, make: Callable[[Shard], ModelWeights], size: int) -> None:
    """Compares the parts of `size` ranks, each made for its shard, with the whole."""
    whole = make(Shard())
    parts = [make(Shard(rank, size)) for rank in range(size)]
    configs = [local_config(config, Shard(rank, size)) for rank in range(size)]
    for name in ("embeddings", "head"):
        tables = [part.embeddings if name == "embeddings" else part.head.matrix.dequantized() for part in parts]
        assert len({len(table) for table in tables}) == 1
        assert all(
            len(table) == each.vocabulary.stop - each.vocabulary.start
            for table, each in zip(tables, configs, strict=True)
        )
        wanted = whole.embeddings if name == "embeddings" else whole.head.matrix.dequantized()
        table = torch.cat([each.float() for each in tables])
        assert torch.equal(table[: len(wanted)], wanted.float()) and not table[len(wanted) :].any(), name
    assert (whole.head.matrix.dequantized() is whole.embeddings) == (
        parts[0].head.matrix.dequantized() is parts[0].embeddings
    )
    assert torch.equal(torch.stack([part.norm for part in parts]), whole.norm.expand(size, *whole.norm.shape))
    layers = zip(whole.layers, *(part.layers for part in parts), strict=True)
    for index, (wanted_layer, *layer) in enumerate(layers):
        found = numbers_of(layer, configs, config, index)
        assert_same(found, numbers_of([wanted_layer], [config], config, index))
        assert len({each.layers[index].mlp for each in configs}) == 1, "ranks differ in their sizes"


def loader(folder: Path, config: ModelConfig, on_load: OnLoad | None = None) -> Callable[[Shard], ModelWeights]:
    options = {"on_load": on_load} if on_load is not None else {}
    return lambda shard: load_weights(folder, config, torch.float32, CPU, no_progress, shard=shard, **options)


@pytest.mark.parametrize("family", choice(list(FAMILIES), in_ci=IN_CI))
def test_families(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path)
    config = config_of(folder)
    for size in sizes_of(config):
        check_parts(config, loader(folder, config), size)


@pytest.mark.parametrize("kind", in_turn(KINDS, in_ci=7))
def test_quantized_matrices(kind: str, tmp_path: Path) -> None:
    family = random.choice(["qwen2", "gemma2", "olmo2", "llama"])
    print(family)
    # Heads of 48 columns begin within groups of 32 and 128; 208 columns are 6.5 groups of 32.
    folder, _ = make_tiny_quantized(kind, family, tmp_path, 1, hidden_size=192, head_dim=48, intermediate_size=208)
    config = config_of(folder)
    for size in (2, 4):
        check_parts(config, loader(folder, config), size)


def test_what_becomes_plain_is_logged(tmp_path: Path) -> None:
    """Reordered columns are in no rank's part as groups; those of rows are."""
    folder, _ = make_tiny_quantized("gptq-reordered", "llama", tmp_path, 1)
    config = config_of(folder)
    with structlog.testing.capture_logs() as logs:
        part = load_weights(folder, config, torch.float32, CPU, no_progress, shard=Shard(1, 2))
        formats = [(layer.qkv.matrix.format, layer.output.matrix.format) for layer in part.layers]
    assert all("columns reordered" in rows and columns == "float32" for rows, columns in formats)
    (told,) = [log for log in logs if log["log_level"] == "warning"]
    assert told["matrices"] == 2 * config.num_layers and told["first"].endswith("o_proj")


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("mxfp4", "gpt-oss"),
        ("awq", "qwen3-moe"),
        ("packed-asymmetric", "mixtral"),
        ("compressed-fp8-weights", "qwen2-moe"),
    ],
)
def test_quantized_experts(kind: str, family: str, tmp_path: Path) -> None:
    folder, _ = make_tiny_mxfp4(tmp_path, 1) if kind == "mxfp4" else make_tiny_quantized(kind, family, tmp_path, 1)
    config = config_of(folder)
    check_parts(config, loader(folder, config), 2)


@pytest.mark.parametrize("layers", ["fp8", "fp8-block", "int4"])
def test_what_is_quantized_on_load_has_the_numbers_of_one_rank(layers: str, tmp_path: Path) -> None:
    folder = make_tiny_model("glm", tmp_path, hidden_size=192, head_dim=48, intermediate_size=208)
    config = config_of(folder)
    check_parts(config, loader(folder, config, OnLoad(layers, head=True)), 2)


@pytest.mark.parametrize("family", ["llama-tied", "gpt-oss", "qwen2-moe", "olmo2"])
def test_random_weights_are_those_of_one_rank(family: str, tmp_path: Path) -> None:
    config = config_of(make_tiny_model(family, tmp_path))
    check_parts(config, lambda shard: random_weights(config, torch.float32, CPU, no_progress, shard=shard), 2)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt-oss", "awq", "gptq", "packed", "fp8-blocks"])
def test_a_rank_reads_its_part_alone(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if family in KINDS:
        folder, _ = make_tiny_quantized(family, "llama", tmp_path, 1, head_dim=128, intermediate_size=512)
    else:
        folder = make_tiny_model(family, tmp_path)
    config = config_of(folder)
    read: list[int] = []
    original = Checkpoint.read

    def counted(self: Checkpoint, name: str, *places: slice) -> Tensor:
        tensor = original(self, name, *places)
        read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(Checkpoint, "read", counted)
    totals = []
    for shard in (Shard(), Shard(1, 2)):
        read.clear()
        list(loader(folder, config)(shard).layers)
        totals.append(sum(read))
    assert totals[1] < 0.56 * totals[0]  # norms and routers are read by all


def test_slices_through_the_staged_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's reader reads in pieces, over runs in the file, is what the safetensors library returns."""
    for family in ("gpt-oss", "gpt2", "olmo2"):
        folder = make_tiny_model(family, tmp_path / family)
        config = config_of(folder)
        with monkeypatch.context() as patch:
            patch.setattr(
                Checkpoint,
                "on",
                lambda self, device: StagedReader(self.tensors, device, self.read, threads=2, piece_bytes=1000),
            )
            check_parts(config, loader(folder, config), 2)


def test_runs_of_random_slices() -> None:
    rng = random.Random(5)
    for _ in range(200):
        shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
        places = []
        for size in shape[: rng.randint(0, len(shape))]:
            begin = rng.randint(0, size - 1)
            places.append(rng.choice([slice(None), slice(begin, rng.randint(begin + 1, size))]))
        numbers = torch.arange(torch.Size(shape).numel()).view(shape)
        runs, wanted = Runs.of(shape, places), numbers[tuple(places)]
        assert runs.shape == tuple(wanted.shape)
        end = wanted.numel() * 2
        begin = rng.randrange(end)
        found = bytearray(end)
        for first, last in ((0, begin), (begin, end)):
            for one, other, place in runs.places(first, last, 2):
                content = numbers.to(torch.int16).numpy().tobytes()
                found[one:other] = content[place : place + other - one]
        assert bytes(found) == wanted.to(torch.int16).numpy().tobytes()


def test_widths_are_divided_at_units_where_there_are_enough() -> None:
    for width, size, unit, each in (
        (96, 2, 1, 48),
        (11008, 8, 128, 1408),  # 86 groups
        (29568, 2, 128, 14848),  # 231 groups
        (96, 4, 32, 24),  # 3 groups are fewer than ranks
        (48, 4, 32, 12),
        (100, 3, 1, 48),
        (10, 4, 1, 3),
    ):
        parts = [width_part(width, Shard(rank, size), unit) for rank in range(size)]
        assert_disjoint([part for part, _ in parts], width)
        assert {padded for _, padded in parts} == {each} and parts[0][0] == slice(0, each), (width, size)
    with pytest.raises(UnsupportedModel, match="An MLP of 5 columns can't be divided among 4 ranks"):
        width_part(5, Shard(0, 4), 1)


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("plain", "llama-biases"),
        ("plain", "gpt2"),
        ("plain", "qwen2-moe"),
        ("plain", "gpt-oss"),
        ("fp8-blocks", "llama"),
        ("awq", "qwen2"),
        ("packed-channel", "llama"),
        ("gptq-reordered", "llama"),
        ("packed", "qwen3-moe"),
    ],
)
def test_zeros_behind_widths_without_equal_parts(kind: str, family: str, tmp_path: Path) -> None:
    odd = {"gpt2": {"n_inner": 110}, "qwen2-moe": {"shared_expert_intermediate_size": 106}}
    sizes = {"intermediate_size": {"plain": 206, "awq": 352, "packed-channel": 360}.get(kind, 200)} | odd.get(
        family, {}
    )
    if "moe" in family:
        sizes["moe_intermediate_size"] = 96 if kind != "plain" else 70
    if kind == "plain":
        folder = make_tiny_model(family, tmp_path, **sizes)
    else:
        folder, _ = make_tiny_quantized(kind, family, tmp_path, 1, **sizes)
    config = config_of(folder)
    for size in (2, 4):
        own = local_config(config, Shard(0, size)).layers[1].mlp
        whole = config.layers[1].mlp
        padded = own.width * size - whole.width
        if isinstance(own, ExpertsConfig) and isinstance(whole, ExpertsConfig) and own.shared_width is not None:
            padded += own.shared_width * size - (whole.shared_width or 0)
        print(f"{padded} columns of zeros on {size} ranks")
        assert padded or size == 2
        check_parts(config, loader(folder, config), size)


@pytest.mark.parametrize(
    ("sizes", "size", "told"),
    [
        ({}, 3, "4 attention heads can't be divided among 3 ranks: set tensor_parallel to a divisor of 4"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96},
            6,
            "4 key-value heads can't be divided among 6 ranks",
        ),
    ],
)
def test_refusals_name_what_can_not_be_divided(sizes: dict[str, int], size: int, told: str, tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path, **sizes)
    config = config_of(folder)
    with pytest.raises(UnsupportedModel, match=told):
        local_config(config, Shard(0, size))
    with pytest.raises(UnsupportedModel, match=told):
        loader(folder, config)(Shard(0, size))


def test_keys_of_fewer_heads_than_ranks_are_held_by_several(tmp_path: Path) -> None:
    config = config_of(make_tiny_model("llama-tied", tmp_path))  # one head of keys
    assert [RankParts(config, Shard(rank, 4)).kv_heads for rank in range(4)] == [slice(0, 1)] * 4
    assert local_config(config, Shard(1, 4)).kv_replicas == 4


def test_the_whole_is_unchanged(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path)
    config = config_of(folder)
    assert local_config(config, Shard()) is config
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == config.vocabulary.stop
