"""Keeps the contexts of conversations that are likely to come back soon.

The value of a block is the rate at which keeping it saves computation: how likely the conversation's next request comes
within some time, over the time for which the block is held until then, times the time to compute a position again. The
time is the best one up to `horizon_s`, as in Gittins' index: what does not come by then can be given up.

*When it comes back.* Times between a conversation's requests are taken as log-normal: its own, as far as they are
known, and those of all others. A client that says `next_turn_s` is believed within `hint_spread`, though with a tenth
of doubt: a tool may take longer. Of conversations of a tenant that have ended their first turn, or a later one, the
share that came back is known, so a tenant of single requests keeps little. `kv_retain_s` 0 says that the conversation
is over; otherwise it will come back within that time. One with a request under way is used next.

*What is shared* comes back at the mean rate at which it was used.

*Tenants.* While several tenants have cached blocks, each keeps `floor` of its equal part: its conversations that may
come back go before all others until it has that much.
"""

from __future__ import annotations

import math

from pydantic import Field

from scheduler_svc.policy import Load, Policy, PolicyParameters, PrefixView

_AWAITED_S = 0.5
"""Within which a conversation with a request under way uses its context, relative to others."""
_USUAL_GAP_S, _USUAL_SPREAD = 10.0, 2.0
"""Of gaps before any is known: seconds, and standard deviation of the logarithm."""
_USUAL_MEAN, _USUAL_SCALE = math.log(_USUAL_GAP_S), 1 / (math.sqrt(2) * _USUAL_SPREAD)
_FEW = 8
"""Gaps from which a conversation's own count more than those of all."""
_DOUBT = 0.1
"""Share of gaps that do not follow a hint."""
_PROMISED = 0.95
"""Chance to come back of a conversation whose client asks to keep it."""
_PROTECTED = 1e6
"""Factor of the value of what is below its tenant's floor."""
_CHUNK = 512
"""Positions whose time shows what a position costs."""
_STEPS = (1 / 256, 1 / 64, 1 / 16, 1 / 4, 1.0)
"""Parts of the horizon among which the best is chosen."""
_USUAL_SHARE = 0.05
"""Share of gaps that follow nothing that was learned."""


class SessionParameters(PolicyParameters):
    horizon_s: float = Field(
        default=300.0, gt=0, description="Seconds within which a conversation must come back to be worth keeping."
    )
    hint_spread: float = Field(
        default=0.5, gt=0, description="Spread of the time until a request around its hint (of the logarithm)."
    )
    floor: float = Field(
        default=0.8, ge=0, le=1, description="Part of a tenant's equal share of the cache that others can't take."
    )
    lead_s: float | None = Field(
        default=None,
        ge=0,
        description="Seconds before its expected return at which a conversation is loaded from the host tier; default: "
        "when its request comes, as what is loaded early takes the place of others.",
    )


class Session(Policy):
    """Retention: contexts of conversations that are likely to come back soon are kept."""

    name = "session"
    Parameters = SessionParameters

    def retain(self, prefix: PrefixView, load: Load) -> float:
        """Returns the seconds of computation that keeping a block of the prefix saves per second, per position."""
        if prefix.awaited_s is not None:
            rate = (1 + prefix.awaited_s) / _AWAITED_S  # in a queue, the first to come is served first
        elif prefix.shared:
            rate = 1 / max(_mean_gap_s(prefix), prefix.idle_s, _AWAITED_S)
        else:
            rate = self._rate(prefix)
        value = rate * _position_s(prefix, load)
        if prefix.tenants > 1 and prefix.tenant_share * prefix.tenants <= float(self.parameters.floor):
            value *= _PROTECTED
        return value

    def prefetch_s(self, prefix: PrefixView, load: Load) -> float | None:
        """Returns a little before the hint, or what its own gaps say if they hardly differ."""
        lead_s = self.parameters.lead_s
        if lead_s is None or prefix.retain_s == 0:
            return None
        if prefix.next_turn_s is not None:
            return max(0.0, prefix.next_turn_s - lead_s)
        if prefix.gaps.count >= _FEW and prefix.gaps.variance <= self.parameters.hint_spread**2:
            return max(0.0, math.exp(prefix.gaps.mean) - lead_s)
        return None

    def _rate(self, prefix: PrefixView) -> float:
        """Returns the chance of a return over the time held until then, for the best time to give up."""
        chance = self._chance(prefix)
        if chance <= 0:
            return 0.0
        idle_s, horizon_s = prefix.idle_s, float(self.parameters.horizon_s)
        now, *later = self._survival(prefix, [idle_s, *(idle_s + part * horizon_s for part in _STEPS)])
        if now <= 1e-9:
            return 0.0
        alive = chance * now / (chance * now + 1 - chance)
        best, held_s, before, at_s = 0.0, 0.0, 1.0, 0.0
        for part, left in zip(_STEPS, later, strict=True):
            until_s, after = part * horizon_s, left / now
            held_s += (until_s - at_s) * (before + after) / 2
            before, at_s = after, until_s
            rate = alive * (1 - after) / (alive * held_s + (1 - alive) * until_s)
            if rate > best:
                best = rate
        return best

    def _chance(self, prefix: PrefixView) -> float:
        """Returns the chance that the conversation comes back at all, as it ended its last request."""
        if prefix.retain_s is not None:
            return _PROMISED if prefix.idle_s < prefix.retain_s else 0.0
        if prefix.next_turn_s is not None:
            return _PROMISED
        return (prefix.returns.returned + 1) / (prefix.returns.ended + 2)

    def _survival(self, prefix: PrefixView, times_s: list[float]) -> list[float]:
        """Returns for each time since the last request's end the chance that the next one is later: a mixture of
        log-normal distributions."""
        own, every = prefix.gaps, prefix.all_gaps
        mean, variance = _USUAL_MEAN, _USUAL_SPREAD**2
        if every.count >= _FEW:
            mean, variance = every.mean, max(every.variance, 0.01)
        if own.count:
            trust = own.count / (own.count + _FEW)
            mean = trust * own.mean + (1 - trust) * mean
            variance = trust * max(own.variance, 0.01) + (1 - trust) * variance
        scale, erfc, logs = 1 / math.sqrt(2 * variance), math.erfc, [math.log(max(t, 1e-3)) for t in times_s]
        known, usual = 0.5 * (1 - _USUAL_SHARE), 0.5 * _USUAL_SHARE
        learned = [
            known * erfc((log_s - mean) * scale) + usual * erfc((log_s - _USUAL_MEAN) * _USUAL_SCALE) for log_s in logs
        ]
        if prefix.next_turn_s is None:
            return learned
        mean, told = math.log(max(prefix.next_turn_s, 1e-3)), 0.5 * (1 - _DOUBT)
        scale = 1 / (math.sqrt(2) * float(self.parameters.hint_spread))
        return [told * erfc((log_s - mean) * scale) + _DOUBT * left for log_s, left in zip(logs, learned, strict=True)]


def _mean_gap_s(prefix: PrefixView) -> float:
    gaps = prefix.gaps if prefix.gaps.count else prefix.all_gaps
    return math.exp(gaps.mean + gaps.variance / 2) if gaps.count else _USUAL_GAP_S


def _position_s(prefix: PrefixView, load: Load) -> float:
    """Returns the time to compute a position at the prefix's end again; 1 if nothing is known."""
    times = load.step_times
    if times is None or not times.known:
        return 1.0
    return times.seconds(_CHUNK, 0, 0, max(0, prefix.tokens - _CHUNK)) / _CHUNK
