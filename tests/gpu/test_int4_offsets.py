"""Products of GGUF's 4-bit types on Hopper, against their definition, with and without a graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from runner_svc.weights.blocks.gguf_matrix import GgufMatrix
from tests.support.gguf_bytes import random_blocks

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.int4.offset_matrix import OffsetInt4Matrix
from runner_svc.cuda.module import is_hopper
from runner_svc.cuda.products.by_class import LinearProducts
from runner_svc.cuda.products.kernels import ProductSettings, linear_launchers, prepared

BF16 = torch.bfloat16
ROWS = (1, 8, 33, 128, 129, 500, 700)


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_1"])
@pytest.mark.parametrize(("out", "width"), [(768, 256), (1024, 4096), (128, 1536)])
def test_any_number_of_rows(kind: str, out: int, width: int) -> None:
    if not is_hopper():
        pytest.skip("needs Hopper")
    stored = random_blocks(np.random.default_rng(), GGMLQuantizationType[kind], (out, width))
    content = torch.frombuffer(bytearray(stored.content), dtype=torch.uint8).view(out, -1)
    matrix = GgufMatrix(content.cuda(), kind)
    made = prepared(matrix, BF16)
    assert isinstance(made, OffsetInt4Matrix)
    products = LinearProducts(linear_launchers(ProductSettings(BF16, 1e-5, "silu")))
    bias = torch.randn(out, device="cuda").to(BF16)
    for rows in ROWS:
        for out_type in (BF16, torch.float32):
            x = torch.randn(rows, width, device="cuda").to(BF16)
            expected = matrix.twin(x) + bias.float()
            y = torch.full((rows, out), torch.nan, device="cuda", dtype=out_type)
            own_bias = bias if out_type is BF16 else None

            def launch(x: torch.Tensor = x, y: torch.Tensor = y, b: torch.Tensor | None = own_bias) -> None:
                products.multiply(torch.cuda.current_stream().cuda_stream, x, made, b, y)

            launch()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launch()
            y.fill_(torch.nan)
            graph.replay()
            found = y.float() + (0.0 if own_bias is not None else bias.float())
            error = float((found - expected).norm() / expected.norm())
            assert error < 0.008, (rows, out_type, error)
