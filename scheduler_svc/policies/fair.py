"""Fair shares between tenants: the virtual token counter (Sheng et al., "Fairness in Serving LLMs", OSDI 2024).

Each tenant has a counter of its service: (input_weight * prompt tokens + output_weight * sampled tokens) / weight. The
tenant with the smallest counter goes first. Prompts are charged on admission, samples as they arrive. The counter of a
tenant that returns from idling is lifted to the smallest counter among waiting tenants, so idle time earns no credit.
The ledger keeps the counts and the lift, whichever policy is installed.

Between two tenants that always have requests waiting, the weighted service differs by at most 2 * max(input_weight *
longest prompt, output_weight * tokens of the KV cache), regardless of other requests (theorem 4.4 of the paper).
"""

from __future__ import annotations

from pydantic import Field, field_validator

from scheduler_svc.policy import LedgerView, Policy, PolicyParameters


class FairParameters(PolicyParameters):
    weights: dict[str, float] = Field(
        default_factory=dict, description="Relative share of each tenant, above 0; 1 for tenants not listed."
    )
    input_weight: float = Field(default=1.0, ge=0, description="Cost of a prompt token.")
    output_weight: float = Field(default=2.0, ge=0, description="Cost of a sampled token.")

    @field_validator("weights")
    @classmethod
    def _above_zero(cls, weights: dict[str, float]) -> dict[str, float]:
        wrong = [tenant for tenant, weight in weights.items() if not 0 < weight < float("inf")]
        if wrong:
            raise ValueError(f"the weights of {', '.join(map(repr, wrong))} must be numbers above 0")
        return weights


class Fair(Policy):
    """Least-served tenant first; first come, first served within a tenant."""

    name = "fair"
    Parameters = FairParameters

    def __init__(self, parameters: FairParameters) -> None:
        super().__init__(parameters)
        self._weights = parameters.weights
        self._input_weight, self._output_weight = parameters.input_weight, parameters.output_weight

    def tenant_key(self, tenant: str, ledger: LedgerView) -> float:
        """Returns the tenant's virtual token counter."""
        account = ledger.account(tenant)
        service = self._input_weight * account.prompt_tokens + self._output_weight * account.sampled_tokens
        return service / self._weights.get(tenant, 1.0) + account.lift
