"""The forward passes of steps over one KV cache: packing on the host and launching on the device.

| step | rows | padded to |
| --- | --- | --- |
| decode | one position each, all sampled | a bucket of rows |
| mixed | any; rows of one position attend as decode rows, others as prompts | a bucket of positions, or not padded |

Grids depend only on the bucket, so padded passes can be captured: whole decode passes, and mixed passes without the LM
head, whose number of rows varies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from runner_svc.decoder.cuda_decoder import CudaDecoder, DeviceInputs, LayerLinears, StepAttention
from runner_svc.decoder.cuda_experts import uses_tiles
from runner_svc.decoder.cuda_mlp import CudaMlp
from runner_svc.decoder.fusions import Activating, Fusions
from runner_svc.decoder.hidden import Hidden
from runner_svc.decoder.skinny_decoder import FewRowLinears, SkinnyDecoder, matrices, skinny_mlps
from runner_svc.decoder.step_rotations import StepRows
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.gpu.fusion_choice import FusionChoice
from runner_svc.gpu.graphs import Variant
from runner_svc.gpu.step_buffers import PackedRows, PackedStep, StepLayout
from runner_svc.interface.attention_launcher import DecodeRows, PrefillRows
from runner_svc.interface.device import Replay
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.launchers import Launchers
from runner_svc.interface.products.skinny_launchers import MAX_ROWS
from runner_svc.interface.step import StepBatch
from runner_svc.transformers_decoder.gpu.cuda_decoder import TransformersCudaDecoder

FEW_ROWS = 64
"""Up to this number of rows, decode passes gain nothing from fusions or Roster's products of many rows: not timed."""

GROUPED_ROWS = 512
"""From this number of rows on, torch's grouped products of experts may be faster than Roster's."""


@dataclass(frozen=True, slots=True)
class MixedShape:
    """Parameters of a mixed step's launches. A captured shape has room for any step of up to `num_tokens` positions."""

    num_rows: int
    num_tokens: int
    decode_rows: int
    prefill_words: int  # of the plan
    fusions: Fusions


@dataclass(frozen=True, slots=True, eq=False)
class WholePass:
    """A pass that computes the logits of all its positions, by its launches."""

    num_tokens: int
    gather: Callable[[int], DeviceInputs]
    attention: StepAttention


@dataclass(frozen=True, slots=True, eq=False)
class MixedStep:
    """A packed mixed step."""

    rows: PackedRows
    shape: MixedShape


class CudaSteps:
    """Packs and launches forward passes; `packed` is the step's input on the device, `logits` its output."""

    def __init__(
        self,
        decoder: CudaDecoder | TransformersCudaDecoder,
        cache: KVCache,
        slots: DeviceSlots,
        launchers: Launchers,
        *,
        num_slots: int,
        max_step_tokens: int,
        tail_words: int,
        most_logits: int | None = None,
    ) -> None:
        """`most_logits`: rows of logits, by default one per slot; with it, the layout has the sections of drafts."""
        self._decoder = decoder
        self._skinny = _skinny_parts(decoder, launchers)
        self.fusions = FusionChoice()
        """The fusions of mixed steps."""
        self.cache = cache
        self.num_slots = num_slots
        self._attention = launchers.attention(cache, slots.tables, num_slots, decoder.config.attention_layers)
        self._gather = launchers.gather(slots.tokens, slots.tables, cache.block_size)
        words = self._max_plan_words(max_step_tokens)
        self.layout = StepLayout.of(num_slots, words, tail_words, drafts=most_logits is not None)
        self.packed = torch.zeros(self.layout.words, dtype=torch.int32, device=decoder.device)
        self._inputs = torch.zeros(3, max_step_tokens, dtype=torch.int32, device=decoder.device)
        # float32 [most_logits, vocab_size]: logits of the sampling rows.
        self.logits = torch.empty(most_logits or num_slots, decoder.config.vocab_size, device=decoder.device)

    def pack_decode(self, step: PackedStep, batch: StepBatch, bucket: int) -> PackedRows:
        """Packs a decode step, padded to `bucket` rows."""
        rows = step.rows(batch, bucket, self.num_slots)
        plan = step.plan(0, self._attention.decode_plan_words(bucket))
        self._attention.plan_decode(batch.ends, batch.slots, plan, batch=bucket)
        return rows

    def decode_variants(self, stream: Callable[[], int], bucket: int) -> list[Variant]:
        """Returns the ways to launch the pass that `packed` describes; each fills the first `bucket` rows of `logits`.

        The model's shape and the GPU determine which one is the fastest.
        """
        gather = partial(self._gathered, num_rows=bucket, num_tokens=bucket)
        return self.variants(stream, WholePass(bucket, gather, self._decode_attention(bucket)))

    def variants(self, stream: Callable[[], int], whole: WholePass) -> list[Variant]:
        """Returns the ways to launch the pass; each fills the first rows of `logits`."""
        variants: list[Variant] = []
        for part in self._skinny if whole.num_tokens <= MAX_ROWS else []:
            if part.decoder is not None:
                variants.append(Variant(f"own, {part.name}", partial(self._run_own, part.decoder, stream, whole)))
            if part.linears is not None:
                run = partial(self._run_decode, stream, whole, Fusions(), part.mlps[_BOTH], part.linears)
                variants.append(Variant(f"own products, {part.name}", run))
            for products, mlps in part.mlps.items():
                name = f"cuBLAS, own {products}, {part.name}"
                variants.append(Variant(name, partial(self._run_decode, stream, whole, Fusions(), mlps)))
        for fusions in self._decode_fusions(whole.num_tokens):
            variants.append(Variant(fusions.name, partial(self._run_decode, stream, whole, fusions)))
        return variants

    def _decode_fusions(self, bucket: int) -> list[Fusions]:
        """Returns the fusions that are worth timing at start-up."""
        decoder = self._decoder
        if isinstance(decoder, CudaDecoder) and decoder.config.experts is not None:
            gathers = uses_tiles(decoder.config.experts, bucket)
            own = Fusions(activating=Activating.GATHERING_PRODUCT if gathers else Activating.PRODUCT)
            grouped = Fusions()
            if bucket >= GROUPED_ROWS and grouped in decoder.fusions:
                return [own, grouped]
            return [own, *self._split([own], bucket)]
        if bucket <= FEW_ROWS:
            return [Fusions()]
        most = decoder.fusions[-1].adding
        plain = [each for each in decoder.fusions if each.activating is Activating.KERNEL or each.adding is most]
        return plain + self._split(plain[-1:], bucket)

    def _split(self, fusions: Sequence[Fusions], num_tokens: int) -> list[Fusions]:
        """Returns the same with products whose blocks share tiles; none where a step of that size can't have them."""
        decoder = self._decoder
        if not isinstance(decoder, CudaDecoder) or not decoder.splits(num_tokens):
            return []
        return [replace(each, splitting=True) for each in fusions]

    def _run_decode(
        self,
        current_stream: Callable[[], int],
        whole: WholePass,
        fusions: Fusions,
        mlps: Sequence[CudaMlp] | None = None,
        linears: LayerLinears | None = None,
    ) -> None:
        stream = current_stream()
        inputs = whole.gather(stream)
        own = {} if linears is None else {"linears": linears}
        hidden = self._decoder.forward(stream, inputs, self.cache, whole.attention, fusions, mlps, **own)
        self._decoder.logits(stream, hidden, self.logits[: whole.num_tokens])

    def _run_own(self, decoder: SkinnyDecoder, current_stream: Callable[[], int], whole: WholePass) -> None:
        stream = current_stream()
        inputs = whole.gather(stream)
        decoder.decode(stream, inputs, self.cache, whole.attention, self.logits[: whole.num_tokens])

    def _decode_attention(self, bucket: int) -> StepAttention:
        plan = self._plan_address()

        def attend(stream: int, layer: int, queries: Tensor, output: Tensor) -> None:
            self._attention.run_decode(stream, layer, queries, output, plan, bucket)

        return attend

    def pack_mixed(self, step: PackedStep, batch: StepBatch, bucket: int | None = None) -> MixedStep:
        """Packs a step of any rows, padded to `bucket` positions if a captured pass is to be replayed."""
        decode = np.flatnonzero(batch.counts == 1)
        prefill = np.flatnonzero(batch.counts > 1)
        if bucket is None:
            shape = self._exact_shape(batch, len(decode), len(prefill))
        else:
            shape = self._captured_shape(bucket)
        rows = step.rows(batch, shape.num_rows, self.num_slots)
        firsts = rows.offsets[: len(batch.slots)]
        self._attention.plan_mixed(
            DecodeRows(batch.ends[decode], batch.slots[decode], firsts[decode]),
            PrefillRows(batch.starts[prefill], batch.counts[prefill], batch.slots[prefill], firsts[prefill]),
            step.plan(0, self._attention.mixed_plan_words(shape.decode_rows, shape.prefill_words)),
            shape.decode_rows,
            shape.prefill_words,
        )
        return MixedStep(rows, shape)

    def run_mixed(self, stream: int, step: MixedStep, replay: Replay | None = None) -> Hidden:
        """Launches the pass that `packed` describes; fills one row of `logits` per sampling row.

        `replay` replays the captured `forward_mixed` of the step's bucket.
        """
        if replay is None:
            self._forward_mixed(stream, step.shape)
        else:
            replay()
        hidden = self._decoder.hidden(step.shape.num_tokens, step.shape.fusions.adding)
        num_sampled = len(step.rows.sample_rows)
        if num_sampled:
            last_positions = self._section(self.layout.last_positions, num_sampled)
            self._sampled_logits(stream, hidden.select(last_positions), self.logits[:num_sampled])
        return hidden

    def _sampled_logits(self, stream: int, hidden: Hidden, out: Tensor) -> None:
        """Fills the logits of a mixed step's sampling rows, from a copy of their hidden states."""
        self._decoder.logits(stream, hidden, out)

    def forward_mixed(self, stream: int, bucket: int, fusions: Fusions | None = None) -> None:
        """Launches the layers of a mixed step of up to `bucket` positions; `fusions` None: the fastest measured."""
        shape = self._captured_shape(bucket)
        self._forward_mixed(stream, replace(shape, fusions=fusions) if fusions is not None else shape)

    @property
    def has_experts(self) -> bool:
        """Whether layers of the model are mixtures of experts."""
        return isinstance(self._decoder, CudaDecoder) and self._decoder.config.experts is not None

    def mixed_fusions(self, num_tokens: int) -> list[Fusions]:
        """Returns the fusions that are worth timing at start-up for mixed steps of that many positions."""
        fusions = self._decoder.fusions
        if self.has_experts:
            return fusions
        most = [each for each in fusions if each.adding is fusions[-1].adding]
        return [*fusions, *self._split(most, num_tokens)]

    def compile_products(self, max_tokens: int) -> None:
        """Compiles the products of mixed steps of up to `max_tokens` positions if `fusions` uses them."""
        if self.fusions.ever(Activating.PRODUCT):
            self._decoder.compile_products(max_tokens)

    def _exact_shape(self, batch: StepBatch, decode_rows: int, prefill_rows: int) -> MixedShape:
        num_tokens = int(batch.counts.sum())
        words = self._attention.prefill_plan_words(num_tokens, prefill_rows) if prefill_rows else 0
        return MixedShape(len(batch.slots), num_tokens, decode_rows, words, self.fusions(num_tokens))

    def _captured_shape(self, bucket: int) -> MixedShape:
        slots = self.num_slots
        words = self._attention.prefill_plan_words(bucket, slots)
        return MixedShape(slots, bucket, slots, words, self.fusions(bucket))

    def _max_plan_words(self, max_step_tokens: int) -> int:
        """Returns the maximum plan words of any batch: a small batch may be planned differently and need more."""
        attention = self._attention
        prefill_words = attention.prefill_plan_words(max_step_tokens, self.num_slots)
        batches = range(1, self.num_slots + 1)
        return max(
            max(attention.decode_plan_words(batch), attention.mixed_plan_words(batch, prefill_words))
            for batch in batches
        )

    def _forward_mixed(self, stream: int, shape: MixedShape) -> None:
        inputs = self._gathered(stream, shape.num_rows, shape.num_tokens)
        self._decoder.forward(stream, inputs, self.cache, self._mixed_attention(shape), shape.fusions)

    def _mixed_attention(self, shape: MixedShape) -> StepAttention:
        plan = self._plan_address()

        def attend(stream: int, layer: int, queries: Tensor, output: Tensor) -> None:
            self._attention.run_mixed(stream, layer, queries, output, plan, shape.decode_rows, shape.prefill_words)

        return attend

    def _gathered(self, stream: int, num_rows: int, num_tokens: int) -> DeviceInputs:
        tokens, positions, slot_mapping = self._inputs[:, :num_tokens].unbind()
        layout = self.layout
        offsets = self._section(layout.offsets, num_rows + 1)
        self._gather(
            stream,
            self._section(layout.slots, num_rows),
            self._section(layout.starts, num_rows),
            offsets,
            tokens,
            positions,
            slot_mapping,
        )
        rows = StepRows(offsets, self._section(layout.prompt_lens, num_rows))
        return self._decoder.inputs(tokens, positions, slot_mapping, rows)

    def _section(self, begin: int, words: int) -> Tensor:
        return self.packed[begin : begin + words]

    def _plan_address(self) -> int:
        return self.packed.data_ptr() + 4 * self.layout.plan


_BOTH = "gate-up and down"


@dataclass(frozen=True, slots=True, eq=False)
class _SkinnyParts:
    """Replacements built from one variant of the products for few rows: the whole decoder, or its MLPs."""

    name: str
    decoder: SkinnyDecoder | None  # only for plain models
    mlps: dict[str, Sequence[CudaMlp]]  # by the products that they replace
    linears: LayerLinears | None  # only for one of several ranks, whose decoder can't be replaced


def _skinny_parts(decoder: CudaDecoder | TransformersCudaDecoder, launchers: Launchers) -> list[_SkinnyParts]:
    """Returns [] for models that the products do not support."""
    if not isinstance(decoder, CudaDecoder):
        return []
    multiplied = matrices(decoder)
    found = launchers.skinny(multiplied) if multiplied is not None else []
    is_rank = decoder.config.is_plain and decoder.config.experts is None and decoder.exchanges is not None
    return [
        _SkinnyParts(
            each.name,
            SkinnyDecoder(decoder, each) if decoder.config.is_plain and decoder.exchanges is None else None,
            {
                _BOTH: skinny_mlps(decoder, each.products, own_down=True),
                "gate-up": skinny_mlps(decoder, each.products, own_down=False),
            }
            if decoder.config.experts is None
            else {},
            decoder.linears_of(FewRowLinears(each.products)) if is_rank else None,
        )
        for each in found
    ]
