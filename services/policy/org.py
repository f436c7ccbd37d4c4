"""What an org was promised: quotas, classes, models, shares. 0 means without limit where a limit is meant."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.policy.classes import REALTIME, STANDARD

ANY_ORG = "*"
"""How the policy of orgs that nobody names is called."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What an org may be called, by a token's `owner` or by an operator."""
MOST_PER_MINUTE = 10**11
"""Of rates and bursts: sixty thousand times as much is still an exact double, in which Redis counts."""


@dataclass(frozen=True)
class OrgPolicy:
    """One org's policy, complete. The fields are those of forebay.v1.OrgPolicy."""

    org: str = ANY_ORG
    tier: str = ""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    requests_burst: int = 0
    """What the bucket holds when full; 0: a minute's worth."""
    tokens_burst: int = 0
    default_class: int = STANDARD
    ceiling_class: int = REALTIME
    models: tuple[str, ...] = ()
    max_concurrent: int = 0
    kv_share: float = 1.0
    weight: float = 1.0

    def complete(self) -> "OrgPolicy":
        """With bursts that say what they are: a minute's worth where none is set, none where there is no rate."""
        requests = self.requests_per_minute and (self.requests_burst or self.requests_per_minute)
        tokens = self.tokens_per_minute and (self.tokens_burst or self.tokens_per_minute)
        return replace(self, requests_burst=requests, tokens_burst=tokens)


def idle_burst(fields: Mapping[str, Any], policy: OrgPolicy) -> str:
    """The field among these that sets a burst where the whole policy has no rate, so that it would mean nothing; empty if none does."""
    for kind in ("requests", "tokens"):
        if fields.get(f"{kind}_burst") and not getattr(policy, f"{kind}_per_minute"):
            return f"{kind}_burst"
    return ""


def layered(org: str, *layers: Mapping[str, Any]) -> OrgPolicy:
    """The org's policy from fields by name; a later layer wins. A default class above the ceiling is lowered to it."""
    fields: dict[str, Any] = {}
    for layer in layers:
        fields |= layer
    policy = OrgPolicy(**{**fields, "org": org}).complete()
    return replace(policy, default_class=max(policy.default_class, policy.ceiling_class))
