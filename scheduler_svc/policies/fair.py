"""Fair shares between tenants: the virtual token counter (Sheng et al., "Fairness in Serving LLMs", OSDI 2024).

Each tenant has a counter of what it was served, (input_weight * prompt + output_weight * sampled tokens) / its weight;
the tenant with the least goes first. Prompts are charged when they are seated, samples as they come. A tenant that
comes back after asking for nothing is lifted to the least counter of those that wait, so nobody saves up. The ledger
holds the counts and the lift: they go on under any policy.

Between two tenants that always have requests waiting, the weighted service differs by at most 2 * max(input_weight *
longest prompt, output_weight * tokens of the KV cache), whatever else they send (theorem 4.4 there).
"""

from __future__ import annotations

from pydantic import Field, field_validator

from scheduler_svc.policy import LedgerView, Policy, PolicyParameters


class FairParameters(PolicyParameters):
    """Parameters of `fair`."""

    weights: dict[str, float] = Field(
        default_factory=dict, description="Share of a tenant relative to others; 1 for those not named. Above 0."
    )
    input_weight: float = Field(default=1.0, ge=0, description="What a prompt token counts.")
    output_weight: float = Field(default=2.0, ge=0, description="What a sampled token counts.")

    @field_validator("weights")
    @classmethod
    def _above_zero(cls, weights: dict[str, float]) -> dict[str, float]:
        wrong = [tenant for tenant, weight in weights.items() if not 0 < weight < float("inf")]
        if wrong:
            raise ValueError(f"the weights of {', '.join(map(repr, wrong))} must be numbers above 0")
        return weights


class Fair(Policy):
    """The tenant that was served least first; first come, first served within a tenant."""

    name = "fair"
    Parameters = FairParameters

    def __init__(self, parameters: FairParameters) -> None:
        super().__init__(parameters)
        self._weights = parameters.weights
        self._input_weight, self._output_weight = parameters.input_weight, parameters.output_weight

    def tenant_key(self, tenant: str, ledger: LedgerView) -> float:
        """The tenant's virtual counter."""
        account = ledger.account(tenant)
        service = self._input_weight * account.prompt_tokens + self._output_weight * account.sampled_tokens
        return service / self._weights.get(tenant, 1.0) + account.lift
