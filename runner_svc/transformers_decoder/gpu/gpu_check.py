"""The start check's steps on a GPU: the kernels' attention, in steps of decode rows and of chunks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from runner_svc.decoder.fusions import Fusions
from runner_svc.decoder.step_rotations import StepRows
from runner_svc.interface.attention_launcher import DecodeRows, PrefillRows
from runner_svc.interface.device import Device
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.launchers import Launchers
from runner_svc.transformers_decoder.gpu.cuda_decoder import TransformersCudaDecoder
from runner_svc.transformers_decoder.start_check import KERNEL_BLOCKS, CheckStep, check_model


def check_on_gpu(decoder: TransformersCudaDecoder, launchers: Launchers, device: Device) -> None:
    """Raises UnsupportedModel if `decoder` does not compute what its model does alone (see `start_check`)."""
    shape, config = KERNEL_BLOCKS, decoder.config
    rows = len(shape.lengths)
    with device.stream():
        cache = KVCache(config, shape.num_blocks, shape.block_size, decoder.dtype, device.device)
        cache.data.fill_(torch.nan)  # so that reading an unwritten position shows
        width = max(map(len, shape.block_tables()))
        tables = torch.zeros(rows, width, dtype=torch.int32, device=device.device)
        attention = launchers.attention(cache, tables, rows, config.attention_layers)

        def on_device(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device.device)

        @torch.inference_mode()
        def compute(step: CheckStep) -> Tensor:
            tables[: len(step.block_tables)] = on_device(step.block_tables)
            decode, prefill = np.flatnonzero(step.counts == 1), np.flatnonzero(step.counts > 1)
            firsts = (np.cumsum(step.counts) - step.counts).astype(np.int32)
            ends = step.starts + step.counts
            words = attention.prefill_plan_words(len(step.tokens), len(prefill)) if len(prefill) else 0
            plan = np.zeros(attention.mixed_plan_words(len(decode), words), np.int32)
            attention.plan_mixed(
                DecodeRows(ends[decode], decode.astype(np.int32), firsts[decode]),
                PrefillRows(step.starts[prefill], step.counts[prefill], prefill.astype(np.int32), firsts[prefill]),
                plan,
                len(decode),
                words,
            )
            packed = on_device(plan)

            def attend(stream: int, layer: int, queries: Tensor, output: Tensor) -> None:
                attention.run_mixed(stream, layer, queries, output, packed.data_ptr(), len(decode), words)

            prompt_lens = step.prompt_lens[firsts]
            step_rows = StepRows(on_device(np.append(firsts, len(step.tokens))), on_device(prompt_lens))
            stream = device.current_stream()
            inputs = decoder.inputs(
                on_device(step.tokens), on_device(step.positions), on_device(step.slot_mapping), step_rows
            )
            hidden = decoder.forward(stream, inputs, cache, attend, Fusions())
            logits = torch.empty(len(step.tokens), config.vocab_size, device=device.device)
            decoder.logits(stream, hidden, logits)
            device.synchronize()
            return logits

        check_model(decoder.model, compute, config.vocab_size, shape)
