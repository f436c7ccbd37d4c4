"""What every org was promised: the policy file's word, under what operators have set since, which all schedulers share."""

import json
from collections import abc
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

from forebay.v1 import types_pb2
from services.common import log
from services.common.errors import Code, StatusError, invalid
from services.policy.classes import CLASS_NAMES
from services.policy.document import Node, PolicyError, Scalar, Sequence
from services.policy.fields import name
from services.policy.org import ANY_ORG, OrgPolicy, idle_burst
from services.policy.policy import LIMIT_READERS, Policy
from services.policy.watched import PolicyFile
from services.scheduler import keys
from services.scheduler.policy.order import Ticket
from services.scheduler.store import Store

LOG = log.get(__name__)
MAX_OVERRIDDEN = 10_000
MAX_KNOWN = 10_000
"""Policies to remember, which the queue's order asks for at every ticket."""
_CLASS_WORDS = {number: word for word, number in CLASS_NAMES.items()}
_READERS = {"tier": name, **LIMIT_READERS}


class Orgs:
    """By name. Overrides are read at a start, when another scheduler tells of a change, and once a second in case its word was lost."""

    def __init__(self, store: Store, file: PolicyFile) -> None:
        self._store = store
        self.file = file
        self._texts: dict[str, str] = {}
        self._overrides: dict[str, dict[str, Any]] = {}
        self._known: dict[str, OrgPolicy] = {}
        self._known_by: Policy | None = None
        self._digest: tuple[Policy | None, str] = (None, "")

    @property
    def policy(self) -> Policy:
        """The policy file's."""
        return self.file.policy

    def get(self, org: str) -> OrgPolicy:
        """The org's policy, complete."""
        policy = self.policy
        if policy is not self._known_by or len(self._known) > MAX_KNOWN:
            self._known, self._known_by = {}, policy
        if org not in self._known:
            self._known[org] = policy.org(org, self._overrides.get(org))
        return self._known[org]

    def all(self) -> list[OrgPolicy]:
        """Of every org that the file or an operator names, by name; the first is what all others have."""
        named = sorted({*self.policy.orgs, *self._overrides})
        return [self.get(org) for org in (ANY_ORG, *named)]

    @property
    def overridden(self) -> list[str]:
        """Orgs that an operator has set something of, by name."""
        return sorted(self._overrides)

    @property
    def digest(self) -> str:
        """Of all that policies depend on: equal on schedulers that know the same, another one when something has changed."""
        if self._digest[0] is not self.policy:
            text = repr(self.policy) + json.dumps(self._texts, sort_keys=True)
            self._digest = (self.policy, sha256(text.encode()).hexdigest()[:16])
        return self._digest[1]

    def stored(self, org: str) -> str:
        """The org's overrides as Redis had them when they were read last; empty if it had none."""
        return self._texts.get(org, "")

    async def refresh(self) -> None:
        """Reads the overrides. StatusError UNAVAILABLE while Redis is away: the last ones stay."""
        (flat,) = await self._store.commands(["HGETALL", keys.ORGS])
        texts = dict(zip(flat[::2], flat[1::2], strict=True))
        if texts != self._texts:
            self._texts, self._overrides = texts, {org: _fields(json.loads(text)) for org, text in texts.items()}
            self._known_by, self._digest = None, (None, "")

    def overrides_with(self, org: str, policy: types_pb2.OrgPolicy, fields: abc.Sequence[str]) -> str:
        """The org's overrides with these fields set, as they are stored. INVALID_ARGUMENT names a field that can't be so."""
        if org == ANY_ORG:
            raise invalid("policy.org", f'"{ANY_ORG}" is every org that nobody names: change the default tier in the policy file')
        wrong = next((key for key in fields if key not in _READERS), None if fields else "")
        if wrong is not None:
            raise invalid("fields", f"{wrong[:40]!r} is no field to set; there are: {', '.join(_READERS)}")
        found = {**self._overrides.get(org, {}), **{key: _read(policy, key) for key in fields}}
        if found.get("tier", "") not in ("", *self.policy.tiers):
            tiers = ", ".join(self.policy.tiers) or "none"
            raise invalid("tier", f"tier is {found['tier']}, which the policy file doesn't have; it has: {tiers}")
        burst = idle_burst(found, self.policy.org(org, found))
        if burst in fields:
            raise invalid(burst, f"{burst} means nothing without {burst.replace('burst', 'per_minute')}: set that too")
        return json.dumps(found)

    def allowed(self, ticket: Ticket) -> Ticket:
        """The ticket, its class lowered to the org's ceiling. PERMISSION_DENIED for a model that the org may not have.

        The gateway has seen to both, by what it knew.
        """
        org = self.get(ticket.org)
        if not self.policy.may_use(org, ticket.model):
            raise StatusError(Code.PERMISSION_DENIED, f"{ticket.org} may not use {ticket.model}", reason="MODEL_NOT_ALLOWED")
        return replace(ticket, latency_class=max(ticket.latency_class, org.ceiling_class))


def _fields(stored: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if key == "models" else value for key, value in stored.items() if key in _READERS}


def _read(policy: types_pb2.OrgPolicy, key: str) -> Any:
    """One field, held to what the policy file may say."""
    value = getattr(policy, key)
    node: Node
    if key == "models":
        node = Sequence(1, [Scalar(1, text, plain=False) for text in value])
    elif key.endswith("_class"):
        node = Scalar(1, _CLASS_WORDS.get(value, str(value)))
    else:
        node = Scalar(1, f"{value:.17g}" if isinstance(value, float) else str(value), plain=key != "tier")
    try:
        return _READERS[key](node, key)
    except PolicyError as error:
        raise invalid(key, error.message) from None
