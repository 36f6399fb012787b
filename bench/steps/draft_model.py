"""Times steps with a draft model: `python -m bench.steps.draft_model --shape llama-3.1-8b --draft qwen3-0.6b`.

Both models have random weights, so hardly any draft is accepted: a step's time says what drafting and verifying cost.
For each batch and number of drafts a row, steps whose rows all draft as many tokens are sent as by a scheduler, a
second one always in flight, after prompts of 512 tokens. The first of them catches up with the prompts.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch

from bench.common.gpu_timing import card
from bench.common.on_gpu import require_gpu
from bench.common.random_model import ALL_SHAPES
from bench.steps.backend import DTYPE, backend_of, no_progress
from bench.steps.verifying import TIMED, WARM, Verifying
from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.execution.runner import Runner
from runner_svc.gpu.drafts.draft_model import DraftParts
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.model_backend import ModelDraftingCudaBackend
from runner_svc.gpu.launchers import CudaLaunchers
from runner_svc.model.checkpoint.random_weights import random_weights
from runner_svc.model.config import ModelConfig


def parts_of(shape: str) -> DraftParts:
    """Returns a draft model of the shape."""
    config = ModelConfig.from_hugging_face(ALL_SHAPES[shape])
    weights = random_weights(config, DTYPE, torch.device("cuda"), no_progress)
    launchers = CudaLaunchers(config, DTYPE)

    def make_decoder(most: int) -> CudaDecoder:
        return CudaDecoder(config, weights, launchers.decoder(False), most)

    return DraftParts(f"model:{shape}", launchers, make_decoder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--draft", choices=sorted(ALL_SHAPES), default="qwen3-0.6b")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--drafts", nargs="+", type=int, default=[1, 3, 5])
    arguments = parser.parse_args()
    require_gpu()
    make = partial(ModelDraftingCudaBackend, parts=parts_of(arguments.draft), drafts=DraftOptions("", max_drafts=7))
    backend = backend_of(arguments.shape, largest=max(arguments.batches), make=make)
    runner = Runner(backend)
    print(f"{arguments.shape} with {arguments.draft}, {card()}\nbatch drafts    step  forward  verified", flush=True)
    for batch in arguments.batches:
        for drafts in (0, *arguments.drafts):
            decoding = Verifying(runner, batch, backend.model.vocab_size)
            decoding.prefill()
            forward_ns = verified = 0
            for index, result in enumerate(decoding.decode(WARM + TIMED, drafts)):
                if index == WARM - 1:
                    begin = time.perf_counter()
                if index >= WARM:
                    forward_ns += result.timings.forward_ns
                    verified += sum(result.drafted)
            step_ms = (time.perf_counter() - begin) * 1e3 / TIMED
            each = verified / TIMED / batch
            print(f"{batch:5} {drafts:6} {step_ms:7.3f} {forward_ns / TIMED / 1e6:8.3f} {each:9.2f}", flush=True)


if __name__ == "__main__":
    main()
