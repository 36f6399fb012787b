from pydantic import Field

from scheduler_svc.policy import LedgerView, Policy, PolicyParameters, RequestView


class ShortestPromptParameters(PolicyParameters):
    tokens_per_s: float = Field(100, ge=0, description="What a second of waiting is worth, in prompt tokens.")


class ShortestPrompt(Policy):
    """Shortest prompt first; a waiting request gains on later arrivals."""

    name = "shortest"
    Parameters = ShortestPromptParameters
    parameters: ShortestPromptParameters

    def key(self, request: RequestView, ledger: LedgerView) -> float:
        return request.prompt_tokens + self.parameters.tokens_per_s * request.arrival_s
