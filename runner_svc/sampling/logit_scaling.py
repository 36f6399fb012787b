"""What becomes of logits after the product with the head."""

from __future__ import annotations

from torch import Tensor

from runner_svc.model.families.description import ModelDescription


def finish_logits(logits: Tensor, model: ModelDescription) -> None:
    """Scales and caps logits in place, as the model says; launches nothing for a model that does neither."""
    if model.logits_scale != 1.0:
        logits.mul_(model.logits_scale)
    if model.logits_soft_cap is not None:
        logits.div_(model.logits_soft_cap).tanh_().mul_(model.logits_soft_cap)
