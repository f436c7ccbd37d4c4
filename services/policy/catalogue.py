"""The models that clients may name: what each stands for, who may use it, what takes its place. Knows no worker."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A model that workers serve: "name@level", or "name" for whichever level is served."""

    model: str
    weight: float = 1.0
    """Its share of the requests is weight / sum of the weights of all targets; 0: none."""

    @property
    def name(self) -> str:
        """Without the level."""
        return self.model.partition("@")[0]

    def covers(self, served: str) -> bool:
        """Whether `served`, a "name@level", is this target."""
        return served == self.model if "@" in self.model else served.partition("@")[0] == self.model


@dataclass(frozen=True)
class PublicModel:
    """A name that clients use, and its targets: one, or several for a canary."""

    name: str
    targets: tuple[Target, ...]
    aliases: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    """Names of public models to try in turn where no target is served; their own fallbacks are not tried."""
    orgs: tuple[str, ...] = ()
    """Orgs that may use it, by name or with `*` for any characters. Empty: all."""

    @property
    def names(self) -> tuple[str, ...]:
        """All that clients may call it."""
        return (self.name, *self.aliases)


Catalogue = Mapping[str, PublicModel]
"""By name. A served model that no entry has as its target keeps its own name, and any org may use it."""


def find(catalogue: Catalogue, name: str) -> PublicModel | None:
    """The public model of this name or alias."""
    return catalogue.get(name) or next((model for model in catalogue.values() if name in model.aliases), None)


def reaching(catalogue: Catalogue, served: str) -> list[PublicModel]:
    """The public models that have this "name@level" as a target."""
    return [model for model in catalogue.values() if any(target.covers(served) for target in model.targets)]


def open_to(model: PublicModel, org: str, allowed: Iterable[str]) -> bool:
    """Whether an org, whose own policy allows these models (none: all), may use a public model: the model and the policy must both say so.

    The policy may name the model, an alias, or a target with or without its level.
    """
    allowed = tuple(allowed)
    names = {*model.names, *(target.model for target in model.targets), *(target.name for target in model.targets)}
    return matches(org, model.orgs) and any(matches(name, allowed) for name in names)


def may_use(catalogue: Catalogue, org: str, allowed: Iterable[str], served: str) -> bool:
    """Whether the org may use a served "name@level", under whatever name."""
    allowed = tuple(allowed)
    public = reaching(catalogue, served)
    if not public:
        return matches(served, allowed) or matches(served.partition("@")[0], allowed)
    return any(open_to(model, org, allowed) for model in public)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns, with `*` for any characters, is the whole name. No pattern: any name is."""
    patterns = tuple(patterns)
    return not patterns or any(_fits(name, pattern) for pattern in patterns)


def _fits(name: str, pattern: str) -> bool:
    """Each part between the stars where it first comes: no backtracking, whatever the pattern."""
    first, *rest = pattern.split("*")
    if not rest:
        return name == pattern
    *middle, last = rest
    at, end = len(first), len(name) - len(last)
    if at > end or not name.startswith(first) or not name.endswith(last):
        return False
    for part in middle:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True
