"""The GPU backend as one rank of several, on the CPU's launchers: tokens of one rank, graphs that ranks agree on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from runner_svc.gpu.backend import CudaBackend
from runner_svc.gpu.capture import prepare_decode
from runner_svc.gpu.ranked.backend import RankedCudaBackend
from runner_svc.group.forming import Group, store_in
from runner_svc.interface.ranks import RankLost, Shard
from runner_svc.weights.on_load import OnLoad
from tests.support.greedy_driver import RandomDriver
from tests.support.host_backend import host_backend
from tests.support.host_device import HostDevice
from tests.support.ranks import together
from tests.support.thoroughness import choice
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

SIZES = {"num_slots": 5, "block_size": 8, "max_step_tokens": 40}
CASES = [
    ("llama", 2, OnLoad("none", False)),
    ("llama-tied", 4, OnLoad("none", False)),
    ("llama-biases", 4, OnLoad("none", False)),
    ("gemma3", 2, OnLoad("none", False)),
    ("cohere", 2, OnLoad("none", False)),
    ("gpt2", 2, OnLoad("none", False)),
    ("granite", 2, OnLoad("none", False)),
    ("qwen3", 2, OnLoad("none", False)),
    ("qwen3-moe", 2, OnLoad("none", False)),
    ("gpt-oss", 2, OnLoad("none", False)),
    ("mixtral", 2, OnLoad("none", False)),
    ("llama", 2, OnLoad("int4", False)),
    ("llama", 2, OnLoad("fp8", False)),
]
IN_CI = [CASES[2], CASES[3], CASES[4], CASES[5], CASES[8], CASES[11], CASES[12]]


def tokens_of(backend: CudaBackend, seed: int, prompts: list[list[int]]) -> list[list[int]]:
    return RandomDriver(backend, random.Random(seed)).generate(prompts, 8, 12)


@pytest.mark.parametrize(("family", "size", "on_load"), choice(CASES, in_ci=IN_CI), ids=str)
def test_ranks_give_the_tokens_of_one(family: str, size: int, on_load: OnLoad, tmp_path: Path) -> None:
    print(f"seed {(seed := random.randrange(2**32))}")
    rng = random.Random(seed)
    folder = make_tiny_model(family, tmp_path / "tiny")
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 30))] for _ in range(5)]
    alone = host_backend(folder, num_blocks=48, on_load=on_load, **SIZES)
    alone.cache.data.fill_(torch.nan)
    expected = tokens_of(alone, seed, prompts)

    def run(shard: Shard) -> tuple[list[list[int]], int]:
        group = Group(shard, store_in(tmp_path, size))
        device = HostDevice()
        backend = host_backend(folder, num_blocks=48 + shard.rank, device=device, on_load=on_load, ranks=group, **SIZES)
        group.form()
        assert isinstance(backend, RankedCudaBackend)
        backend.regroup()
        backend.cache.data.fill_(torch.nan)
        assert backend.num_blocks == 48
        return tokens_of(backend, seed, prompts), device.replays

    actual = together(size, run)
    if on_load.layers == "fp8":  # a rank rounds rows of its own columns, by their largest
        expected = actual[0][0]
    assert all(tokens == expected for tokens, _ in actual)
    assert len({replays for _, replays in actual}) == 1 and actual[0][1] > 0


def test_ranks_take_the_graphs_that_rank_0_measured_and_form_again(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny")
    prompts = [[3, 5, 7], [11] * 20]

    class Timed(HostDevice):
        """Times in which each rank would choose other sizes and variants."""

        def __init__(self, rank: int) -> None:
            super().__init__(mixed_graphs=rank == 0)
            self._times = random.Random(rank)
            self.timed = 0

        def seconds(self, replay: object) -> float:
            self.timed += 1
            return self._times.random()

    def run(shard: Shard) -> tuple[object, ...]:
        group, device = Group(shard, store_in(tmp_path, 2)), Timed(shard.rank)
        backend = host_backend(folder, num_blocks=48, device=device, ranks=group, **SIZES)
        assert isinstance(backend, RankedCudaBackend)
        found: list[object] = []
        for epoch in (1, 2):
            group.form(epoch)
            backend.regroup()
            sizes = backend._graphs.sizes
            assert device.captured == len(sizes) + len(backend._mixed_graphs.sizes)
            found += [sizes, {size: backend._graphs.variant(size) for size in sizes}, backend._mixed_graphs.sizes]
            found.append(tokens_of(backend, 1, prompts))
        timed = device.timed
        backend.regroup()
        assert device.timed == timed and bool(timed) == (shard.rank == 0)  # rank 0 measured before the group formed
        group.abort()
        with pytest.raises(RankLost):
            backend.regroup()
        return tuple(map(str, found))

    first, second = together(2, run)
    assert first == second and first[:4] == first[4:]


def test_a_step_of_a_group_that_was_given_up_has_no_result(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny")

    def run(shard: Shard) -> str:
        why = ""
        group = Group(shard, store_in(tmp_path, 2), given_up=lambda: why)
        backend = host_backend(folder, num_blocks=48, ranks=group, **SIZES)
        group.form()
        assert isinstance(backend, RankedCudaBackend)
        backend.regroup()
        driver = RandomDriver(backend, random.Random(1))
        driver.generate([[1, 2, 3]], 2, 12)
        why = "rank 1 is gone"
        with pytest.raises(Exception, match="RankLost: rank 1 is gone"):
            RandomDriver(backend, random.Random(1)).generate([[1, 2, 3]], 2, 12)
        assert not backend.is_broken_by(RankLost(why))
        return why

    together(2, run)


@pytest.mark.parametrize("family", choice(["llama", "qwen3-moe", "llama-biases"], in_ci=["llama-biases"]))
def test_a_deterministic_pass_of_ranks_does_not_depend_on_the_plans(family: str, tmp_path: Path) -> None:
    print(f"seed {(seed := random.randrange(2**32))}")
    rng = random.Random(seed)
    folder = make_tiny_model(family, tmp_path / "tiny")
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 30))] for _ in range(4)]
    expected = tokens_of(host_backend(folder, num_blocks=48, canonical=True, **SIZES), seed, prompts)

    def run(shard: Shard) -> list[list[list[int]]]:
        group = Group(shard, store_in(tmp_path, 2))
        backend = host_backend(folder, num_blocks=48, canonical=True, ranks=group, **SIZES)
        group.form()
        assert isinstance(backend, RankedCudaBackend)
        backend.regroup()
        return [tokens_of(backend, seed + other, prompts) for other in range(2)]

    assert together(2, run) == [[expected, expected]] * 2


@pytest.mark.parametrize(("family", "num_variants"), [("llama", 4), ("qwen3-moe", 1), ("gemma3", 3)])
def test_all_variants_of_a_ranks_decode_step_give_the_same_logits(
    family: str, num_variants: int, tmp_path: Path
) -> None:
    folder = make_tiny_model(family, tmp_path / "tiny")

    def run(shard: Shard) -> list[torch.Tensor]:
        group = Group(shard, store_in(tmp_path, 2))
        backend = host_backend(folder, num_blocks=60, ranks=group, **SIZES)
        group.form()
        assert isinstance(backend, RankedCudaBackend)
        backend.regroup()
        steps, slots = backend._steps, backend._slots
        backend.cache.data.copy_(torch.randn(backend.cache.data.shape, generator=torch.Generator().manual_seed(1)))
        slots.tokens.copy_(torch.randint(NUM_TOKENS, slots.tokens.shape, generator=torch.Generator().manual_seed(2)))
        slots.spread(64, backend.cache)
        prepare_decode(steps, 64, 4, 4)
        logits = []
        for variant in steps.decode_variants(lambda: 0, 4):
            steps.logits.fill_(torch.nan)
            variant.launch()
            logits.append(steps.logits[:4].clone())
        return logits

    first, second = together(2, run)
    assert len(first) == num_variants
    for own, other in zip(first, second, strict=True):
        assert torch.equal(own, other)
        torch.testing.assert_close(own, first[0], rtol=1e-4, atol=1e-5)


def test_ranks_compute_the_scales_of_an_fp8_cache_together(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny")
    prompts, seed = [[3, 5, 7], [11] * 20, list(range(20, 45))], 1  # a code of e4m3 may be a near tie
    alone = host_backend(folder, num_blocks=48, fp8_cache=True, **SIZES)
    expected = tokens_of(alone, seed, prompts)

    def run(shard: Shard) -> tuple[torch.Tensor, list[list[int]]]:
        group = Group(shard, store_in(tmp_path, 2))
        backend = host_backend(folder, num_blocks=48, fp8_cache=True, ranks=group, **SIZES)
        assert backend.cache.scales is not None and (backend.cache.scales == 1).all()
        for epoch in (1, 2):
            group.form(epoch)
            assert isinstance(backend, RankedCudaBackend)
            backend.regroup()
        return backend.cache.scales, tokens_of(backend, seed, prompts)

    (first, tokens), (second, others) = together(2, run)
    assert alone.cache.scales is not None
    assert torch.equal(torch.cat([first, second], 2), alone.cache.scales)
    assert tokens == others == expected
