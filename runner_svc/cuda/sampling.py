"""Draws tokens on the device with the semantics and noise of the reference, `runner_svc/sampling/sampler.py`.

The host packs a record per sampling row (`sample_records`) into the step's copy to the device; the device keeps no
state of a row except the token buffer. There are two launches. If some row has penalties, bias, min_tokens or a mask,
`kernels/adjust_logits.cu` changes those rows' logits in place, so that log-probabilities can be computed from them
afterwards. Then `kernels/sample.cu` draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import DTYPE_DEFINES, load

_THREADS = 1024
_SAMPLE_SHARED_BYTES = 66 * 1024  # struct Shared of sample.cu, rounded up
_SCRATCH_ROWS = 64  # rows adjusted at the same time


class CudaSampler:
    """The sampling kernels for one vocabulary and the token buffer that drawn tokens are written to."""

    def __init__(
        self,
        vocab_size: int,
        dtype: torch.dtype,
        token_buffer: Tensor,
        *,
        writes: bool = True,
        canonical: bool = False,
    ) -> None:
        """`dtype` is that of the logits; `token_buffer` is int32 [slots + 1, context_length] and is kept alive.

        `writes` False: drawn tokens are not written to the token buffer. `canonical`: without contraction
        (`runner_svc.cuda.module.load`).
        """
        defines: dict[str, int | str] = {"LOGIT": DTYPE_DEFINES[dtype], "VOCAB": vocab_size}
        defines |= {"CANONICAL": 1} if canonical else {}
        self._token_buffer, self._writes = token_buffer, writes
        self._scratch = torch.zeros(_SCRATCH_ROWS, vocab_size, dtype=torch.int32, device=token_buffer.device)
        self._adjust = Kernel(load("adjust_logits", defines), "adjust_logits", "PPPPPPPii", _THREADS)
        self._sample = Kernel(load("sample", defines), "sample", "PPPPPi", _THREADS, shared_bytes=_SAMPLE_SHARED_BYTES)

    def __call__(
        self,
        stream: int,
        logits: Tensor,
        records: Tensor,
        extra_ids: Tensor,
        extra_values: Tensor,
        tokens: Tensor,
        finite: Tensor,
        *,
        adjusted: bool,
        masks: Tensor | None = None,
    ) -> None:
        """Draws the tokens of L rows.

        `logits` is [L, vocab_size], contiguous. Rows with penalties, bias, min_tokens or a mask are changed in place;
        forbidden ids get the lowest finite number. `masks` is int32 [L, ceil(vocab_size / 32)] with a bit per id, set
        if the id is allowed; None allows all. `records` (bytes of SAMPLE_RECORD [L], at a multiple of 16), `extra_ids`,
        `extra_values` and `adjusted` are those of SampleRows, the tensors on the device. The outputs are `tokens`,
        int32 [L], -1 for a row that is not finite, and `finite`, uint8 [L]. The token of a finite row is also written
        to the token buffer, unless this sampler only draws.
        """
        num_rows = logits.shape[0]
        if num_rows == 0:
            return
        context_length = self._token_buffer.shape[1]
        if adjusted or masks is not None:
            self._adjust(
                stream,
                min(num_rows, _SCRATCH_ROWS),
                logits.data_ptr(),
                records.data_ptr(),
                extra_ids.data_ptr(),
                extra_values.data_ptr(),
                self._token_buffer.data_ptr(),
                self._scratch.data_ptr(),
                address_of(masks),
                num_rows,
                context_length,
            )
        self._sample(
            stream,
            num_rows,
            logits.data_ptr(),
            records.data_ptr(),
            self._token_buffer.data_ptr(),
            tokens.data_ptr(),
            finite.data_ptr(),
            context_length if self._writes else 0,  # no position is written at or beyond it
        )
