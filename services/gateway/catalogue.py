"""What a model's name means to an org: the policy file's catalogue over the models that this gateway has. Loads nothing."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from forebay.v1 import types_pb2
from services.common.errors import Code, FieldViolation, StatusError, invalid
from services.gateway.models import Capability, Models, ServedModel
from services.policy import catalogue as public
from services.policy.catalogue import PublicModel

_MAX_NAME_CHARS = 128
_MAX_NAMED = 10  # models in an error

_DOES = {"generate": "generates text (chat and completions)", "embed": "turns texts into vectors (embeddings)"}

Weighted = tuple[ServedModel, float]


class Catalogue:
    """Resolves names as the catalogue stands now. What an org may not use is, to that org, not there."""

    def __init__(self, models: Models, entries: Callable[[], public.Catalogue] = dict) -> None:
        """`entries` gives the policy file's catalogue, anew for each question."""
        self._models = models
        self._entries = entries

    def resolve(
        self, name: str, policy: types_pb2.OrgPolicy, sticky: str = "", *, field: str = "model", capability: Capability | None = None
    ) -> ServedModel:
        """The model that answers for a name, an alias or name@level; for an empty name the only one that the org may use.

        `capability`: what it must do; None: anything. Of a canary's targets, `sticky` always gets the same one while workers serve it.
        Raises NOT_FOUND, or INVALID_ARGUMENT where the model does something else; both blame `field`.
        """
        model = self._resolve(name, policy, sticky, field, capability)
        if capability is not None and model.capability != capability:
            raise invalid(field, f"the model {model.name} {_DOES[model.capability]}: ask it for that, or name one that {_DOES[capability]}")
        return model

    def _resolve(self, name: str, policy: types_pb2.OrgPolicy, sticky: str, field: str, capability: Capability | None) -> ServedModel:
        entries = self._entries()
        candidates = self._candidates(entries, name or self._only_name(policy, capability), policy)
        if not candidates:
            raise self._not_found(name, policy, field)
        point = _point(f"{policy.org}\0{name}\0{sticky}") if len(candidates) > 1 else 0.0
        chosen = _pick(candidates, point)
        if chosen.ready:
            return chosen
        for others in (candidates, *self._fallbacks(entries, name, policy)):
            ready = [(model, weight) for model, weight in others if model.ready]
            if ready:
                return _pick(ready, point)
        return chosen

    def _only_name(self, policy: types_pb2.OrgPolicy, capability: Capability | None) -> str:
        offered = self.list(policy)
        # Who asks for nothing in particular means the one that generates, where there is one: a model that embeds stands beside it.
        offered = [model for model in offered if model.capability == (capability or "generate")] or (offered if capability is None else [])
        return offered[0].name if len(offered) == 1 else ""

    def _not_found(self, name: str, policy: types_pb2.OrgPolicy, field: str) -> StatusError:
        known = ", ".join(model.name for model in self.list(policy)[:_MAX_NAMED]) or "no model for this org"
        what = f"there is no model {name[:_MAX_NAME_CHARS]!a}" if name else f"{field} is missing"
        message = f"{what}: this mesh serves {known}"
        return StatusError(Code.NOT_FOUND, message, reason="MODEL_NOT_FOUND", violations=[FieldViolation(field, message)])

    def list(self, policy: types_pb2.OrgPolicy) -> Sequence[ServedModel]:
        """What the org may name, by name: public models with the facts of their likeliest target, and models that no entry is about."""
        entries = self._entries()
        offered = [model for model in self._models.list() if self._may_name(entries, model, policy)]
        for entry in entries.values():
            candidates = self._targets(entry) if public.open_to(entry, policy.org, policy.models) else []
            if candidates:
                likeliest, _ = max(candidates, key=lambda candidate: (candidate[0].ready, candidate[1]))
                own = likeliest.aliases if likeliest.name == entry.name else ()
                offered.append(replace(likeliest, name=entry.name, aliases=tuple(dict.fromkeys((*entry.aliases, *own)))))
        return sorted(offered, key=lambda model: model.name)

    def describe(self, name: str, policy: types_pb2.OrgPolicy) -> ServedModel:
        """As `list` has it. Raises NOT_FOUND."""
        by_name = {own: model for model in self.list(policy) for own in (model.name, *model.aliases)}
        return by_name.get(name) or self.resolve(name, policy)

    def _candidates(self, entries: public.Catalogue, name: str, policy: types_pb2.OrgPolicy, level: str = "") -> Sequence[Weighted]:
        """Models that may answer for a name, none of them without weight."""
        entry = self._entry(entries, name)
        if entry is not None:
            return self._targets(entry, level) if public.open_to(entry, policy.org, policy.models) else []
        model = self._models.at(name, level) if level else self._models.get(name)
        if model is not None:
            return [(model, 1.0)] if self._may_name(entries, model, policy) else []
        base, _, level = name.rpartition("@")
        return self._candidates(entries, base, policy, level) if base and level and "@" not in base else []

    def _fallbacks(self, entries: public.Catalogue, name: str, policy: types_pb2.OrgPolicy) -> Sequence[Sequence[Weighted]]:
        entry = self._entry(entries, name)
        return [self._candidates(entries, other, policy) for other in entry.fallbacks] if entry is not None else []

    def _entry(self, entries: public.Catalogue, name: str) -> PublicModel | None:
        model = self._models.get(name)
        return public.find(entries, name) or (entries.get(model.name) if model is not None else None)

    def _targets(self, entry: PublicModel, only_level: str = "") -> Sequence[Weighted]:
        """Those that this gateway has the files of, at `only_level` where there is one."""
        found: list[Weighted] = []
        for target in entry.targets:
            model, level = self._models.get(target.name), target.model.partition("@")[2]
            if model is None or model.name != target.name or not target.weight or (only_level and level not in ("", only_level)):
                continue
            at_level = self._models.at(target.name, only_level or level) if only_level or level else model
            if at_level is None and not only_level:  # it is to be served so, and no worker has yet
                at_level = replace(model, level=level, version="", ready=False)
            if at_level is not None:
                found.append((at_level, target.weight))
        return found

    @staticmethod
    def _may_name(entries: public.Catalogue, model: ServedModel, policy: types_pb2.OrgPolicy) -> bool:
        """Whether a model goes by its own name, and for this org. One that an entry has as a target goes by the entry's."""
        return not public.reaching(entries, model.full_name) and public.may_use({}, policy.org, policy.models, model.full_name)


def _pick(candidates: Sequence[Weighted], point: float) -> ServedModel:
    """The one whose part of the line from 0 to 1, as long as its share of the weights, holds the point."""
    rest = point * sum(weight for _, weight in candidates)
    for model, weight in candidates:
        if rest < weight:
            return model
        rest -= weight
    return candidates[-1][0]


def _point(text: str) -> float:
    """From 0 up to 1, evenly over texts, and the same for the same text."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:6], "big") / 2**48
