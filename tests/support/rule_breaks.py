"""Ways to break each rule of docs/determinism.md: see `broken_rules`. `test_broken_rules.py` has what finds them."""

from __future__ import annotations

from typing import Any

import torch
from pytest import MonkeyPatch

from runner_svc.arithmetic import check
from tests.support.broken_rules import Rule, both, source, value


def last_of_equals(patch: MonkeyPatch) -> None:
    """Makes torch's maximum that of the highest index."""
    whole = torch.Tensor.max

    def last(x: torch.Tensor, *args: Any, dim: int | None = None) -> Any:
        if dim is None:
            return whole(x, *args)
        values, indexes = whole(x.flip(dim), dim=dim)
        return values, x.shape[dim] - 1 - indexes

    patch.setattr(torch.Tensor, "max", last)


FUNCTIONS = "runner_svc.arithmetic.functions:"
PRODUCT = "runner_svc.arithmetic.products:"
CANONICAL = "runner_svc.arithmetic.canonical:CanonicalArithmetic."
ATTENTION = "runner_svc.attention.canonical:"
PLAN = "runner_svc.attention.canonical_plan:"
CHECK = "runner_svc.attention.canonical_check:"
MLP = "runner_svc.decoder.mlp:"
SAMPLER = "runner_svc.sampling.sampler:"
NUMERICS = "runner_svc.backends.determinism:Determinism.numerics"
ATTEND = ATTENTION + "CanonicalAttention._attend"
WEIGHTED = ATTENTION + "CanonicalAttention._weighted"
FUSED = "(total.double() + x.double() * y.double()).float()"

SOURCES = [
    # Products
    ("plain, not packed", "products", PRODUCT + "canonical_product", "        if is_padded:",
     "        return functional.linear(x, weight, bias)\n        if is_padded:"),
    ("a row alone multiplied alone", "rows alone", PRODUCT + "canonical_product", "0 < count < least", "0 < count < 0"),
    # Functions
    ("sums in another order", "functions", FUNCTIONS + "row_sum", "x.contiguous()", "x.flip(-1)"),
    ("sums of strided rows", "start check", FUNCTIONS + "row_sum", "x.contiguous()", "x"),
    ("RMSNorm by the root's inverse", "functions", FUNCTIONS + "rms_norm", "(x / root)", "(x * root.reciprocal())"),
    ("RMSNorm, weight first", "functions", FUNCTIONS + "rms_norm", "(x / root).mul_(weight)", "x * weight / root"),
    ("RMSNorm of torch", "functions", FUNCTIONS + "rms_norm",
     "(x / root).mul_(weight)", "functional.rms_norm(x, weight.shape, weight, eps)"),
    ("LayerNorm by the mean of squares", "functions", FUNCTIONS + "layer_norm",
     "row_sum(centred * centred).div_(x.shape[-1])",
     "(row_sum(x * x).div_(x.shape[-1]) - (row_sum(x) / x.shape[-1]).square())"),
    ("LayerNorm of torch", "functions", FUNCTIONS + "layer_norm",
     "centred.div_(root)", "functional.layer_norm(x, x.shape[-1:], eps=eps)"),
    ("silu of torch", "functions", FUNCTIONS + "silu",
     "torch.div(x, denominator, out=denominator)", "functional.silu(x)"),
    ("silu by sigmoid", "functions", FUNCTIONS + "silu",
     "torch.div(x, denominator, out=denominator)", "x * denominator.reciprocal()"),
    ("gelu of torch", "functions", FUNCTIONS + "gelu",
     "(x * math.sqrt(0.5)).erf_().add_(1).mul_(x * 0.5)", "functional.gelu(x)"),
    ("gelu divided by a root", "functions", FUNCTIONS + "gelu", "(x * math.sqrt(0.5))", "(x / math.sqrt(2))"),
    ("gelu, tanh form of torch", "functions", FUNCTIONS + "gelu_tanh",
     "inner.tanh_().add_(1).mul_(x * 0.5)", "functional.gelu(x, approximate='tanh')"),
    ("gelu, tanh form multiplied out", "functions", FUNCTIONS + "gelu_tanh",
     "mul_(0.044715).add_(x).mul_(math.sqrt(2 / math.pi))",
     "mul_(0.044715 * math.sqrt(2 / math.pi)).add_(x * math.sqrt(2 / math.pi))"),
    ("sigmoid of torch", "functions", FUNCTIONS + "sigmoid", "x.neg().exp_().add_(1).reciprocal_()", "x.sigmoid()"),
    ("mish by softplus", "functions", FUNCTIONS + "mish", "x.exp().log1p_()", "functional.softplus(x)"),
    ("softmax of torch", "functions", FUNCTIONS + "softmax", "weights / row_sum(weights)", "x.softmax(dim=-1)"),
    ("softmax by the inverse", "functions", FUNCTIONS + "softmax",
     "weights / row_sum(weights)", "weights * row_sum(weights).reciprocal()"),
    ("log-softmax of torch", "functions", FUNCTIONS + "log_softmax",
     "shifted - row_sum(shifted.exp()).log_()", "x.log_softmax(dim=-1)"),
    ("log-softmax in one difference", "functions", FUNCTIONS + "log_softmax",
     "shifted - row_sum(shifted.exp()).log_()",
     "x - (row_sum(shifted.exp()).log_() + x.amax(dim=-1, keepdim=True))"),
    ("equal scores of a router in any order", "functions", FUNCTIONS + "largest",
     "ordered = values.sort(dim=-1, descending=True, stable=True)", "ordered = values.topk(count)"),
    # Parts of a layer
    ("RoPE fused", "rope", CANONICAL + "add_product", "total.add_(x * y)", f"total.copy_({FUSED})"),
    ("RoPE's cos in float64", "rope", "runner_svc.decoder.rope:RotaryEmbedding._of_frequencies",
     "angles.cos()", "angles.double().cos().float()"),
    ("experts added by number", "qwen2-moe", MLP + "ExpertMlp.__call__", "    parts = x.new_empty",
     "    order = experts.argsort(dim=-1)\n    experts, weights = experts.gather(1, order), weights.gather(1, order)\n"
     "    parts = x.new_empty"),
    ("the shared expert first", "qwen2-moe", MLP + "ExpertMlp.__call__",
     "total = weights[:, :1] * parts[:, 0]\n", "total = self._shared(x) + weights[:, :1] * parts[:, 0]\n"
     "    from copy import copy\n    self = copy(self)\n    self._shared = None\n"),
    ("experts added fused", "qwen2-moe", CANONICAL + "add_product", "total.add_(x * y)", f"total.copy_({FUSED})"),
    ("a router's softmax of torch", "qwen2-moe", CANONICAL + "softmax", "functions.softmax(x)", "x.softmax(dim=-1)"),
    ("a router's sum in float64", "glm4-moe", CANONICAL + "row_sum",
     "functions.row_sum(x)", "functions.row_sum(x.double()).float()"),
    ("groups by their best score", "glm4-moe", MLP + "_in_groups",
     "arithmetic.largest(grouped, 2)[0]", "arithmetic.largest(grouped, 1)[0]"),
    ("residual fused", "granite", CANONICAL + "add", "x + y * factor", "(x.double() + y.double() * factor).float()"),
    ("residual, both additions at once", "llama", "runner_svc.decoder.cpu_decoder:DecoderLayer.forward",
     "return self._arithmetic.add(hidden, self._mlp_post_norm(self._summed(self._mlp(normed))), self._multiplier)",
     "return (hidden - attended) + (attended + self._mlp(normed))"),
    # Attention
    ("soft-cap by the inverse", "attention", ATTEND, "div_(described.soft_cap)", "mul_(1 / described.soft_cap)"),
    ("each segment's own maximum", "attention", WEIGHTED,
     "scores.sub_(of_pairs.unsqueeze(-1)).clamp_(min=LEAST_EXPONENT).exp_()",
     "own = scores.amax(dim=-1, keepdim=True).clamp(min=-1e30)\n"
     "    scores.sub_(own).clamp_(min=LEAST_EXPONENT).exp_()\n"
     "    scores.mul_((own - of_pairs.unsqueeze(-1)).clamp_(min=LEAST_EXPONENT).exp_())"),
    ("a maximum without the sink", "attention", WEIGHTED, "sinks, torch.maximum", "None, torch.maximum"),
    ("no least exponent", "attention", WEIGHTED,
     "(of_pairs.unsqueeze(-1)).clamp_(min=LEAST_EXPONENT)", "(of_pairs.unsqueeze(-1))"),
    ("hidden positions have the least weight", "attention", WEIGHTED, "masked.mul_(group.visible)", "pass"),
    ("sums of p in another order", "attention", WEIGHTED, "scores.sum(dim=-1)", "scores.flip(-1).sum(dim=-1)"),
    # Some machines' bmm adds halves of its columns itself: 102 of 256 is no block of any.
    ("values of parts of segments", "attention", WEIGHTED,
     "torch.bmm(weights, values[:, :, head], out=products[head, part.pairs])",
     "half = part.keys * 2 // 5\n            products[head, part.pairs] = torch.bmm(weights[..., :half], "
     "values[:, :half, head]) + torch.bmm(weights[..., half:], values[:, half:, head])"),
    ("segments added in descending order", "attention", ATTENTION + "_over_segments",
     "(segments, -1)).unbind(1))", "(segments, -1)).unbind(1))[::-1]"),
    ("the sink added first", "attention", WEIGHTED,
     "total = _over_segments(group, scores.sum(dim=-1), None, torch.add)",
     "sink = None if sinks is None else (sinks - most).clamp_(min=LEAST_EXPONENT).exp_()\n"
     "    sinks = None\n    total = _over_segments(group, scores.sum(dim=-1), sink, torch.add)"),
    ("attention multiplied by the inverse", "attention", WEIGHTED,
     "output.div_(total.unsqueeze(-1))", "output.mul_(total.unsqueeze(-1).reciprocal())"),
    ("values of hidden positions that are not finite", "not finite", ATTENTION + "CanonicalAttention.run",
     "group.width > 1 and", "False and"),
    # Draws
    ("noise without the position", "draws", SAMPLER + "draw_keys",
     "golden * (positions.astype(np.uint64) + np.uint64(1))", "golden"),
    ("noise without the choice", "draws", SAMPLER + "draw_keys",
     " ^ (golden * (sample_indexes", " ^ (0 * (sample_indexes"),
    ("noise without the seed", "draws", SAMPLER + "draw_keys", "seeds + golden", "golden"),
    ("noise of the step's first row", "draws", SAMPLER + "Sampler._choose", "gumbel(words[index]", "gumbel(words[:1]"),
    ("noise by log of the difference", "draws", SAMPLER + "gumbel",
     "uniform.neg_().log1p_()", "uniform.neg_().add_(1).log_()"),
    ("equal logits by the higher id", "draws", SAMPLER + "_likeliest",
     "torch.nonzero(values >= least).squeeze(1)", "torch.nonzero(values >= least).squeeze(1).flip(0)"),
    ("top-p in float32", "draws", SAMPLER + "_reaching", ".exp().to(torch.float64)", ".exp()"),
    ("top-p of a mass in float32", "draws", SAMPLER + "_reaching", "scaled.exp().double()", "scaled.exp()"),
    ("log-probabilities by torch's log-softmax", "draws", SAMPLER + "_row_logprobs",
     "functions.log_softmax(line)", "line.log_softmax(dim=-1)"),
    ("drafts kept that are not drawn", "drafts", "runner_svc.backends.host_slots:accept",
     "goes_on = equal & finite", "equal[:, :width] = drafts >= 0\n    goes_on = equal & finite"),
    # What `numerics` covers
    ("numerics without the order's version", "numerics", NUMERICS, "(ORDER_VERSION, *", "(*"),
    ("numerics without libraries and variables", "numerics", NUMERICS, "*_libraries(), ", ""),
    ("numerics without RoPE", "numerics", NUMERICS, ", self.config.rope_fingerprint", ""),
    ("numerics without config.json", "numerics", NUMERICS,
     '(self.folder / "config.json", *checkpoint_files(self.folder))', "checkpoint_files(self.folder)"),
    ("numerics without weights", "numerics", NUMERICS, ", *checkpoint_files(self.folder)", ","),
    ("numerics without bits of products", "numerics", NUMERICS, "digest.update(self.arithmetic.digest)", "pass"),
    ("numerics without bits of functions", "numerics", NUMERICS,
     "digest.update(check_functions(self._widths()))", "pass"),
    ("numerics without bits of attention", "numerics", NUMERICS,
     "digest.update(self._checked(SEGMENT)[2])", "pass"),
]  # fmt: skip
"""What is wrong, what finds it, where, and which part of the source is replaced by what."""

RULES = [
    *(Rule(what, finder, source(*change)) for what, finder, *change in SOURCES),
    Rule("sizes of weights not padded", "products", value(1, PRODUCT + "_UNIT")),
    Rule("any number of rows in one call", "rows beyond 2,048", value(10**9, PRODUCT + "MOST_ROWS")),
    Rule("long rows added in one go", "functions", value(10**9, FUNCTIONS + "MOST_SUMMED")),
    Rule("other parts of long rows", "functions", value(512, FUNCTIONS + "PART")),
    Rule(
        "quick gelu by torch's sigmoid",
        "functions",
        lambda patch: patch.setitem(check.ELEMENTWISE, "quick_gelu", lambda x: x * (x * 1.702).sigmoid()),
    ),
    Rule(
        "scaled behind the product",
        "attention",
        both(
            source(ATTENTION + "CanonicalAttention.run", "queries * scale", "queries"),
            source(
                ATTEND,
                "    if described.soft_cap is not None:",
                "    scores.mul_(head_dim**-0.5 if described.scale is None else described.scale)\n"
                "    if described.soft_cap is not None:",
            ),
        ),
    ),
    Rule(
        "segments of 64",
        "attention",
        both(
            value(64, PLAN + "SEGMENT", ATTENTION + "SEGMENT"),
            source(PLAN + "CanonicalPlanner.__init__", "max(block_size, keys)", "min(64, max(block_size, keys))"),
        ),
    ),
    Rule(
        "segments by the number of queries",
        "positions alone",
        both(
            value(256, PLAN + "SEGMENT", ATTENTION + "SEGMENT"),
            source(
                ATTENTION + "CanonicalAttention.plan",
                "    windows = {",
                "    from runner_svc.attention import canonical_plan\n"
                "    globals()['SEGMENT'] = canonical_plan.SEGMENT = 128 if counts.max() == 1 else 256\n"
                "    self._planner._unit = min(self._planner._unit, 128)\n"  # 256 where a machine needs it
                "    windows = {",
            ),
        ),
    ),
    Rule("products of any number of queries", "bmm by rows", value((1,), CHECK + "_ROWS")),
    Rule("keys always left out", "bmm by keys", value((32,), CHECK + "_KEYS")),
    Rule("the last of equal logits", "draws", last_of_equals),
]
