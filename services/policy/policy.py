"""The policy file as a whole: tiers, orgs, classes, models. Everything in it is optional; without one nobody is limited."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.policy import catalogue, document
from services.policy.catalogue import Catalogue, PublicModel, Target
from services.policy.classes import CLASS_NAMES, DEFAULT_CLASSES, ClassPolicy
from services.policy.document import Node, PolicyError
from services.policy.fields import Reader, check_name, choice, integer, mapping, name, names, number, record
from services.policy.org import ANY_ORG, MOST_PER_MINUTE, OrgPolicy, idle_burst, layered

_RATE = integer(0, MOST_PER_MINUTE)
LIMIT_READERS: Mapping[str, Reader] = {
    "requests_per_minute": _RATE,
    "tokens_per_minute": _RATE,
    "requests_burst": _RATE,
    "tokens_burst": _RATE,
    "default_class": choice(CLASS_NAMES),
    "ceiling_class": choice(CLASS_NAMES),
    "models": names,
    "max_concurrent": integer(0, 10**6),
    "kv_share": number(0, 1, above=True),
    "weight": number(0, 10**6, above=True),
}
"""What a tier may say, and an org over its tier."""
_CLASS_READERS: Mapping[str, Reader] = {
    "weight": number(0, 10**6, above=True),
    "age_seconds": number(0, 86_400, above=True),
    "floor_share": number(0, 1),
    "ttft_target_ms": number(0, 86_400_000),
    "tpot_target_ms": number(0, 86_400_000),
    "deadline_seconds": number(0, 604_800),
}

Fields = Mapping[str, Any]
"""Those fields of a policy that somebody has set."""


@dataclass(frozen=True)
class Policy:
    """A policy file that makes sense."""

    tiers: Mapping[str, Fields] = field(default_factory=dict)
    default_tier: str = ""
    orgs: Mapping[str, Fields] = field(default_factory=dict)
    classes: Mapping[int, ClassPolicy] = field(default_factory=lambda: DEFAULT_CLASSES)
    models: Catalogue = field(default_factory=dict)

    def org(self, name: str, overrides: Fields | None = None) -> OrgPolicy:
        """What an org was promised: its tier's fields, under its own, under `overrides`. ANY_ORG: one that nobody names."""
        own = {**self.orgs.get(name, {}), **(overrides or {})}
        # An override may name a tier that the file has no longer: then what the file itself says counts, and limits don't fall away.
        named = (own.get("tier", ""), self.orgs.get(name, {}).get("tier", ""))
        tier = next((tier for tier in named if tier in self.tiers), self.default_tier)
        return layered(name, self.tiers.get(tier, {}), own, {"tier": tier})

    def may_use(self, org: OrgPolicy, served: str) -> bool:
        """Whether the org may use a served "name@level"."""
        return catalogue.may_use(self.models, org.org, org.models, served)


def load(path: Path) -> Policy:
    """The policy of a file. PolicyError names the file and the line; OSError where it can't be read."""
    with path.open("rb") as file:
        data = file.read(document.MAX_BYTES + 1)  # One more than it may have: enough to be refused.
    try:
        return parse(data.decode())
    except UnicodeDecodeError as error:
        raise PolicyError(data[: error.start].count(b"\n") + 1, "it isn't UTF-8", str(path)) from None
    except PolicyError as error:
        raise PolicyError(error.line, error.message, str(path)) from None


def parse(text: str) -> Policy:
    """The policy of a YAML text. PolicyError names the line."""
    return read(document.compose(text))


def read(root: Node) -> Policy:
    """The policy of a composed text. PolicyError names the line."""
    readers: dict[str, Reader] = {"tiers": _tiers, "default_tier": name, "orgs": _orgs, "classes": _classes, "models": _models}
    found = record(root, "", readers)
    policy = Policy(**found)
    _check_tiers(policy, mapping(root, ""))
    _check_bursts(policy, mapping(root, ""))
    _check_floors(policy, mapping(root, ""))
    return policy


def _tiers(node: Node, path: str) -> dict[str, Fields]:
    return {key: record(value, f"{path}.{key}", LIMIT_READERS) for key, value in _named(node, path)}


def _orgs(node: Node, path: str) -> dict[str, Fields]:
    orgs: dict[str, Fields] = {}
    for key, value in _named(node, path):
        if key == ANY_ORG:
            raise PolicyError(value.line, f'an org can\'t be called "{ANY_ORG}": what all others get is said by default_tier')
        orgs[key] = record(value, f"{path}.{key}", {"tier": name, **LIMIT_READERS})
    return orgs


def _classes(node: Node, path: str) -> dict[int, ClassPolicy]:
    found = record(node, path, {key: lambda value, where: record(value, where, _CLASS_READERS) for key in CLASS_NAMES})
    return {number: replace(DEFAULT_CLASSES[number], **found.get(key, {})) for key, number in CLASS_NAMES.items()}


def _models(node: Node, path: str) -> dict[str, PublicModel]:
    models: dict[str, PublicModel] = {}
    lines: dict[str, int] = {}
    for key, value in _named(node, path):
        readers: dict[str, Reader] = {"targets": _targets, "aliases": names, "fallbacks": names, "orgs": names}
        fields = record(value, f"{path}.{key}", readers)
        models[key] = PublicModel(name=key, **{"targets": (Target(key),), **fields})
        for public in models[key].names:
            if public in lines:
                raise PolicyError(value.line, f"{path}.{key}: {public} is the name of another model already (line {lines[public]})")
            lines[public] = value.line
    for model in models.values():
        for fallback in model.fallbacks:
            if fallback not in models or fallback == model.name:
                words = "itself" if fallback == model.name else f"{fallback}, which is no model here"
                raise PolicyError(lines[model.name], f"{path}.{model.name}.fallbacks names {words}")
    return models


def _targets(node: Node, path: str) -> tuple[Target, ...]:
    """`name@level`, a list of such, or a list of {model, weight}."""
    items = node.items if isinstance(node, document.Sequence) else [node]
    targets = tuple(_target(item, path) for item in items)
    if not any(target.weight for target in targets):
        raise PolicyError(node.line, f"{path} has no target with a weight over 0")
    if len({target.model for target in targets}) < len(targets):
        raise PolicyError(node.line, f"{path} names a target twice")
    return targets


def _target(node: Node, path: str) -> Target:
    if isinstance(node, document.Scalar):
        return Target(name(node, path))
    fields = record(node, path, {"model": name, "weight": number(0, 10**6)})
    if "model" not in fields:
        raise PolicyError(node.line, f"a target in {path} names no model")
    return Target(**fields)


def _named(node: Node, path: str) -> Iterable[tuple[str, Node]]:
    for key, (line, value) in mapping(node, path).items():
        check_name(key, line, f"a name in {path}")
        yield key, value


def _check_tiers(policy: Policy, root: Mapping[str, tuple[int, Node]]) -> None:
    known = ", ".join(policy.tiers) or "none"
    if policy.default_tier and policy.default_tier not in policy.tiers:
        raise PolicyError(root["default_tier"][0], f"default_tier is {policy.default_tier}, which is no tier here; there are: {known}")
    for org, fields in policy.orgs.items():
        if "tier" in fields and fields["tier"] not in policy.tiers:
            line, _ = mapping(mapping(root["orgs"][1], "")[org][1], "")["tier"]
            raise PolicyError(line, f"orgs.{org}.tier is {fields['tier']}, which is no tier here; there are: {known}")


def _check_bursts(policy: Policy, root: Mapping[str, tuple[int, Node]]) -> None:
    tiers = [("tiers", key, fields, layered(key, fields)) for key, fields in policy.tiers.items()]
    orgs = [("orgs", key, fields, policy.org(key)) for key, fields in policy.orgs.items()]
    for section, key, fields, whole in tiers + orgs:
        if burst := idle_burst(fields, whole):
            line, _ = mapping(mapping(root[section][1], "")[key][1], "")[burst]
            raise PolicyError(line, f"{section}.{key}.{burst} means nothing without {burst.replace('burst', 'per_minute')}: set that too")


def _check_floors(policy: Policy, root: Mapping[str, tuple[int, Node]]) -> None:
    total = sum(entry.floor_share for entry in policy.classes.values())
    if total > 1:
        raise PolicyError(root["classes"][0], f"the floor_share of all classes together is {total:g}; it may be at most 1")
