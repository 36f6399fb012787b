"""Products and log-probabilities of the deterministic mode on a GPU: right, and equal in every bit by all routes."""

from __future__ import annotations

from functools import lru_cache, partial

import pytest
import torch
from torch import Tensor

from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.plain_matrix import PlainMatrix

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.canonical.log_softmax import CanonicalLogprobs
from runner_svc.cuda.canonical.many_variant import ManyVariant
from runner_svc.cuda.canonical.products import CanonicalProducts, usual_route
from runner_svc.cuda.module import is_hopper, num_multiprocessors
from runner_svc.cuda.products.skinny_variant import canonical_parts
from runner_svc.gpu.canonical.check import Checked, ProductCheck
from runner_svc.interface.products.canonical_launchers import NormedRows

if not is_hopper():
    pytest.skip("needs Hopper, and kernels compiled for it", allow_module_level=True)

BF16, CUDA, EPS = torch.bfloat16, torch.device("cuda"), 1e-5
# Width of the residual stream, of queries and of the MLP, rows of the QKV matrix, of the head.
SIZES = [(4096, 4096, 14336, 6144, 2048), (1024, 2048, 3072, 4096, 1000), (256, 128, 512, 256, 264)]


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def matrix(rows: int, width: int) -> PlainMatrix:
    return PlainMatrix((torch.randn(rows, width, device=CUDA) / width**0.5).to(BF16))


def products(hidden: int, *, many: bool | None = None) -> CanonicalProducts:
    def route(kind: str, *sizes: int) -> bool:
        return usual_route(kind, *sizes) if many is None else many

    return CanonicalProducts(EPS, "silu", hidden, 4096, CUDA, route=route, overlap=True)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bits_do_not_depend_on_the_number_of_rows(sizes: tuple[int, ...]) -> None:
    hidden, queries, inner, qkv, head = sizes
    biases = {rows: torch.randn(rows, device=CUDA).to(BF16) for rows in (qkv, hidden, 2 * inner)}
    shapes = ((qkv, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner), (head, hidden))
    linears = [LinearWeights(matrix(*shape), biases.get(shape[0]) if hidden < 4096 else None) for shape in shapes]
    layer = Checked(*linears)
    assert len(ProductCheck(products(hidden), stream(), 2048, CUDA).digest(layer)) == 16


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.dtype is BF16 else torch.int32)


@pytest.mark.parametrize("kind", ["store", "logits", "add"])
@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
@pytest.mark.parametrize("tokens", [130, 256, 500, 1100])
def test_every_variant_of_many_rows_has_the_bits_of_few(tokens: int, sizes: tuple[int, ...], kind: str) -> None:
    """Again and again, between others that use the same room for sums of parts."""
    hidden, _, inner, qkv, head = sizes
    outputs, width = {"store": (qkv, hidden), "logits": (head, hidden), "add": (hidden, inner)}[kind]
    weight, x = matrix(outputs, width), torch.randn(tokens, width, device=CUDA).to(BF16)
    squares = torch.rand(-(-tokens // 128), -(-width // 64), 128, device=CUDA) * 100
    bias = torch.randn(outputs, device=CUDA).to(BF16) if hidden < 4096 else None
    norm, before = torch.randn(outputs, device=CUDA).to(BF16), torch.randn(tokens, outputs, device=CUDA).to(BF16)

    def run(launcher: CanonicalProducts) -> list[Tensor]:
        out = torch.full((tokens, outputs), torch.nan, device=CUDA, dtype=torch.float32 if kind == "logits" else BF16)
        if kind != "add":
            launcher.store(stream(), NormedRows(x, squares), weight, out, bias)
            return [bits(out)]
        residual = before.clone()
        following = launcher.add(stream(), NormedRows(x, None), weight, residual, norm, out, bias)
        assert following.squares is not None
        kept = following.squares.transpose(1, 2).flatten(0, 1)[:tokens].clone()
        return [bits(out), bits(residual), bits(kept)]

    expected = run(products(outputs if kind == "add" else hidden, many=False))
    ends = "ENDS_RESIDUAL" if kind == "add" else "ENDS_STORE"
    half, parts = -(-outputs // 128) * 64, canonical_parts(outputs, width)
    launcher = products(outputs if kind == "add" else hidden, many=True)
    variants = ManyVariant.possible(num_multiprocessors(), ends, tokens, half, width, parts)
    for index in range(3 * len(variants)):
        variant = variants[index % len(variants)]
        launcher.many._choose = lru_cache(None)(partial(_always, variant))
        for one, other in zip(run(launcher), expected, strict=True):
            assert torch.equal(one, other), (variant, int((one != other).sum()))
    assert not launcher.many._flags.any()


def _always(variant: ManyVariant, *sizes: object) -> ManyVariant:
    return variant


@pytest.mark.parametrize("tokens", [3, 300])
def test_products_are_right(tokens: int) -> None:
    hidden, _, inner, qkv, _ = SIZES[1]
    launcher, norm = products(hidden, many=True), torch.randn(hidden, device=CUDA).to(BF16)
    embeddings, ids = torch.randn(50, hidden, device=CUDA).to(BF16), torch.randint(50, (tokens,), device=CUDA).int()

    def empty(width: int) -> Tensor:
        return torch.full((tokens, width), torch.nan, device=CUDA, dtype=BF16)

    residual, normed, activated, out = empty(hidden), empty(hidden), empty(inner), empty(qkv)
    first, gate_up, down = matrix(qkv, hidden), matrix(2 * inner, hidden), matrix(hidden, inner)
    x = launcher.take(stream(), embeddings, ids, norm, residual, normed)
    launcher.store(stream(), x, first, out)
    factors, rows = torch.full((tokens,), torch.nan, device=CUDA), embeddings[ids.long()].float()
    launcher.scales(stream(), x, factors)
    torch.testing.assert_close(factors, 1 / (rows.square().mean(dim=1) + EPS).sqrt(), rtol=1e-5, atol=0)
    expected = torch.nn.functional.rms_norm(embeddings[ids.long()].float(), (hidden,), norm.float(), EPS)
    torch.testing.assert_close(out.float(), expected @ first.weight.float().t(), rtol=0.01, atol=0.02)
    launcher.gated(stream(), x, gate_up, activated)
    gate, up = (expected @ gate_up.weight.float().t()).chunk(2, dim=-1)
    torch.testing.assert_close(activated.float(), torch.nn.functional.silu(gate) * up, rtol=0.02, atol=0.03)
    x = launcher.add(stream(), NormedRows(activated, None), down, residual, norm, normed)
    total = embeddings[ids.long()].float() + activated.float() @ down.weight.float().t()
    torch.testing.assert_close(residual.float(), total, rtol=0.01, atol=0.02)
    torch.testing.assert_close(normed.float(), residual.float() * norm.float(), rtol=0.01, atol=0.01)
    assert x.squares is not None
    squares = x.squares.transpose(1, 2).flatten(0, 1)[:tokens].sum(dim=1)
    torch.testing.assert_close(squares, residual.float().square().sum(dim=1), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("vocab_size", [1003, 49_152, 151_936])
def test_log_probabilities(vocab_size: int) -> None:
    logits, tokens = torch.randn(20, vocab_size, device=CUDA) * 5, torch.randint(vocab_size, (20,), device=CUDA)
    logits[3, 7] = logits[3, 5] = logits[3].max() + 1
    logprobs = CanonicalLogprobs(vocab_size)
    values, ids, largest = logprobs(stream(), logits, tokens, 5)
    exact = logits.double().log_softmax(dim=-1)
    torch.testing.assert_close(values.double(), exact.gather(1, tokens.unsqueeze(1)).squeeze(1), rtol=0, atol=2e-5)
    torch.testing.assert_close(largest.double(), exact.topk(5, dim=-1).values, rtol=0, atol=2e-5)
    assert ids[3, :2].tolist() == [5, 7]
    for begin, end in ((0, 1), (3, 8), (19, 20)):
        some = logprobs(stream(), logits[begin:end], tokens[begin:end], 5)
        for got, whole in zip(some, (values, ids, largest), strict=True):
            assert torch.equal(got, whole[begin:end])
