"""What names mean to an org: aliases, levels, canaries, fallbacks, and models that aren't there."""

from collections import Counter
from collections.abc import Sequence

import pytest

from forebay.v1 import admin_pb2, scheduler_pb2, types_pb2
from services.common.errors import Code, StatusError
from services.gateway.catalogue import Catalogue
from services.gateway.models import Models
from services.policy.catalogue import PublicModel, Target
from services.policy.policy import parse
from tests.unit.gateway.build import make_model

ACME = types_pb2.OrgPolicy(org="acme")


def models(*served: str, gone: Sequence[str] = ()) -> Models:
    """Models one, two and three, of which live workers serve some at some levels. `gone` were served before."""
    names = ("one", "two", "three")
    known = Models([make_model(name=name, aliases=(f"{name}-alias",), level="", version="", ready=False) for name in names])
    for living in (served + tuple(gone), served):
        known.update_fleet(admin_pb2.GetFleetResponse(workers=[_worker(name) for name in living]))
    return known


def _worker(served: str) -> admin_pb2.WorkerState:
    model = scheduler_pb2.WorkerModel(model=served, version=f"v-{served}", loaded=True)
    return admin_pb2.WorkerState(registration=scheduler_pb2.Register(models=[model]), ready=True)


def catalogue(known: Models, *entries: PublicModel) -> Catalogue:
    return Catalogue(known, lambda: {entry.name: entry for entry in entries})


def allowing(*patterns: str, org: str = "acme") -> types_pb2.OrgPolicy:
    return types_pb2.OrgPolicy(org=org, models=patterns)


def refused(where: Catalogue, name: str, policy: types_pb2.OrgPolicy = ACME) -> str:
    with pytest.raises(StatusError) as caught:
        where.resolve(name, policy)
    assert caught.value.code is Code.NOT_FOUND
    assert caught.value.violations[0].field == "model"
    assert len(caught.value.message) < 300
    assert caught.value.message.isprintable()
    return caught.value.message


def test_without_a_catalogue_models_go_by_their_own_names() -> None:
    plain = Catalogue(models("one@fp32", "one@fp32", "one@int4", "two@fp32"))
    assert [model.name for model in plain.list(ACME)] == ["one", "three", "two"]
    assert plain.resolve("one-alias", ACME).full_name == "one@fp32"
    assert plain.resolve("one@int4", ACME).full_name == "one@int4"
    assert plain.resolve("one-alias@int4", ACME).full_name == "one@int4"
    assert plain.describe("one-alias", ACME).name == "one"
    for name in ("four", "", "ONE", "one@bf16", "one@", "@fp32", "three@fp32", "one@fp32@fp32", "x" * 10_000, "a\nb", "\ud800"):
        assert "one, three, two" in refused(plain, name)


def test_an_only_model_needs_no_name() -> None:
    where = Catalogue(models("one@fp32", "two@fp32"))
    assert where.resolve("", allowing("one")).name == "one"
    assert Catalogue(Models([make_model()])).resolve("", ACME).name == "tiny"


def test_an_entry_replaces_the_names_of_its_targets() -> None:
    where = catalogue(models("one@fp32", "one@int4", "two@fp32"), PublicModel("chat", (Target("one@int4"),), aliases=("gpt-4o",)))
    for name in ("chat", "gpt-4o", "chat@int4", "gpt-4o@int4"):
        assert where.resolve(name, ACME).full_name == "one@int4"
    first = where.list(ACME)[0]
    assert (first.name, first.aliases, first.level) == ("chat", ("gpt-4o",), "int4")
    assert where.describe("gpt-4o", ACME).name == "chat"
    assert "chat" in refused(where, "chat@fp32")
    both = catalogue(models("one@fp32", "two@fp32"), PublicModel("chat", (Target("one"),)))
    refused(both, "one")
    refused(both, "one-alias")
    assert both.resolve("chat@fp32", ACME).full_name == "one@fp32"
    own = catalogue(models("one@fp32"), PublicModel("one", (Target("one"),), aliases=("uno",)))
    assert {own.resolve(name, ACME).name for name in ("one", "one-alias", "uno", "uno@fp32")} == {"one"}
    assert own.describe("one", ACME).aliases == ("uno", "one-alias")


def test_weights_are_honoured_over_many_requests() -> None:
    targets = (Target("one", 90), Target("two", 9.5), Target("three", 0.5))
    where = catalogue(models("one@fp32", "two@fp32", "three@fp32"), PublicModel("chat", targets))
    count = 100_000
    seen = Counter(where.resolve("chat", ACME, f"request-{number}").name for number in range(count))
    for target in targets:
        share = target.weight / 100
        deviation = (count * share * (1 - share)) ** 0.5
        assert abs(seen[target.model] - count * share) < 4 * deviation, seen


def test_a_conversation_stays_with_its_canary_and_orgs_are_drawn_apart() -> None:
    entry = PublicModel("chat", (Target("one"), Target("two"), Target("three", 0)))
    where = catalogue(models("one@fp32", "two@fp32", "three@fp32"), entry)
    labels = [f"user-{number}" for number in range(200)]
    first = [where.resolve("chat", ACME, label).name for label in labels]
    assert first == [where.resolve("chat", ACME, label).name for label in labels]
    assert set(first) == {"one", "two"}
    assert first != [where.resolve("chat", types_pb2.OrgPolicy(org="other"), label).name for label in labels]


def test_what_no_worker_serves_makes_way() -> None:
    entry = PublicModel("chat", (Target("one", 99), Target("two@int4", 1)), fallbacks=("spare", "last"))
    others = PublicModel("spare", (Target("two@fp32"),)), PublicModel("last", (Target("three"),))
    labels = [f"user-{number}" for number in range(50)]

    def answers(*served: str, policy: types_pb2.OrgPolicy = ACME) -> set[str]:
        where = catalogue(models(*served, gone=("one@fp32", "two@int4", "two@fp32", "three@fp32")), entry, *others)
        return {model.full_name for model in (where.resolve("chat", policy, label) for label in labels) if model.ready}

    assert answers("one@fp32", "three@fp32") == {"one@fp32"}
    assert answers("two@int4", "three@fp32") == {"two@int4"}
    assert answers("two@fp32", "three@fp32") == {"two@fp32"}
    assert answers("three@fp32") == {"three@fp32"}
    assert answers("two@fp32", "three@fp32", policy=allowing("chat", "last")) == {"three@fp32"}, "an org falls back on its own alone"
    assert answers() == set()
    never = catalogue(models(), entry, *others).resolve("chat", ACME)
    assert (never.version, never.ready) == ("", False)


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (ACME, {"chat", "code", "three"}),
        (allowing("chat"), {"chat"}),
        (allowing("gpt-*"), {"chat"}),
        (allowing("one", "three"), {"chat", "three"}),
        (allowing("thr*"), {"three"}),
        (allowing("three@fp32"), {"three"}),
        (allowing("none"), set()),
        (allowing(org="stranger"), {"chat", "three"}),
        (allowing("code", org="stranger"), set()),
    ],
)
def test_what_an_org_may_not_use_is_not_there(policy: types_pb2.OrgPolicy, named: set[str]) -> None:
    where = catalogue(
        models("one@fp32", "two@fp32", "three@fp32"),
        PublicModel("chat", (Target("one"),), aliases=("gpt-4o",)),
        PublicModel("code", (Target("two"),), orgs=("ac*",)),
    )
    assert {model.name for model in where.list(policy)} == named
    for name in ("chat", "gpt-4o", "code", "three", "three@fp32"):
        if {"gpt-4o": "chat", "three@fp32": "three"}.get(name, name) in named:
            assert where.resolve(name, policy).ready
            assert where.describe(name, policy).ready
        else:
            words = refused(where, name, policy)
            assert words.replace(repr(name), "") == refused(where, "made-up", policy).replace("'made-up'", "")


def test_targets_without_files_here_are_left_out() -> None:
    where = catalogue(
        models("one@fp32"), PublicModel("chat", (Target("elsewhere", 99), Target("one"))), PublicModel("far", (Target("mars"),))
    )
    assert {where.resolve("chat", ACME, str(number)).name for number in range(50)} == {"one"}
    assert [model.name for model in where.list(ACME)] == ["chat", "three", "two"]
    refused(where, "far")


def test_a_change_of_the_file_counts_at_once() -> None:
    text = "models: {chat: {targets: one}}"
    where = Catalogue(models("one@fp32", "two@fp32"), lambda: parse(text).models)
    assert where.resolve("chat", ACME).name == "one"
    text = "models: {chat: {targets: [{model: two@fp32, weight: 1}]}}"
    assert where.resolve("chat", ACME).name == "two"


def test_a_model_without_a_name_is_the_only_one_that_does_what_is_asked() -> None:
    known = Models([make_model(name="chat", aliases=()), make_model(name="vectors", aliases=(), dimensions=4, compiler=None)])
    names = {capability: catalogue(known).resolve("", ACME, capability=capability).name for capability in ("generate", "embed", None)}
    assert names == {"generate": "chat", "embed": "vectors", None: "chat"}
    alone = Models([make_model(name="vectors", aliases=(), dimensions=4, compiler=None)])
    assert catalogue(alone).resolve("", ACME).name == "vectors"
    with pytest.raises(StatusError, match="model is missing"):
        catalogue(alone).resolve("", ACME, capability="generate")


def test_a_model_that_does_something_else_is_refused_by_what_it_does() -> None:
    known = Models([make_model(name="vectors", aliases=("v",), dimensions=4, compiler=None)])
    with pytest.raises(StatusError, match="the model vectors turns texts into vectors") as caught:
        catalogue(known).resolve("v", ACME, capability="generate")
    assert (caught.value.code, caught.value.violations[0].field) == (Code.INVALID_ARGUMENT, "model")
