"""Dashboards are what their program writes; and neither they nor the rules read a series that nobody exports."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.gateway.settings import GatewaySettings
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings
from tools.dashboards.__main__ import DASHBOARDS, FOLDER
from tools.dashboards.dashboard import Dashboard, rendered
from tools.series import OF_PROMETHEUS, exported, named

DEPLOY = Path(__file__).parents[3] / "deploy"
RULES = [DEPLOY / "prometheus" / "rules" / name for name in ("recording.yml", "alerts.yml")]


def groups(path: Path) -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(path.read_text())["groups"]:
        yield from group["rules"]


def recorded() -> set[str]:
    return {rule["record"] for rule in groups(RULES[0])}


@pytest.fixture(scope="module")
def known() -> set[str]:
    return exported() | recorded() | OF_PROMETHEUS


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_committed_file_is_what_the_program_writes(name: str) -> None:
    assert (FOLDER / f"{name}.json").read_text() == rendered(DASHBOARDS[name]), "run `make dashboards`"


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_panels_lie_side_by_side_and_read_what_is_exported(dashboard: Dashboard, known: set[str]) -> None:
    made = json.loads(rendered(dashboard))
    taken: set[tuple[int, int]] = set()
    for panel in made["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert named(target["expr"]), target["expr"]
            assert named(target["expr"]) <= known, (panel["title"], named(target["expr"]) - known)
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    assert {variable.series for variable in dashboard.variables} <= known


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_rules_read_what_is_exported(path: Path, known: set[str]) -> None:
    for rule in groups(path):
        assert named(rule["expr"]), rule
        assert named(rule["expr"]) <= known, (rule, named(rule["expr"]) - known)


def test_every_rule_has_a_test_of_its_own() -> None:
    tested = "".join(path.read_text() for path in sorted((DEPLOY / "prometheus" / "tests").glob("*.yml")))
    alerts = {rule["alert"] for rule in groups(RULES[1])}
    assert alerts == set(re.findall(r"alertname: (\w+)\n\s+exp_alerts", tested))
    for name in recorded():
        assert f"expr: {name}" in tested or f"expr: round({name}" in tested, name


def test_every_alert_says_whom_it_concerns_and_where_to_look() -> None:
    settings = {f"FOREBAY_{name.upper()}" for kind in (GatewaySettings, SchedulerSettings, WorkerSettings) for name in kind.model_fields}
    for rule in groups(RULES[1]):
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
        assert set(re.findall(r"FOREBAY_\w+", rule["annotations"]["description"])) <= settings, rule["alert"]


def test_grafana_finds_dashboards_and_sources_where_they_are() -> None:
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "dashboards" / "forebay.yaml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
    sources = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "datasources" / "forebay.yaml").read_text())["datasources"]
    uids = {source["uid"] for source in sources}
    assert set(re.findall(r'"uid": "(forebay-(?:prometheus|jaeger))"', rendered(DASHBOARDS["fleet"]))) <= uids
    (prometheus,) = (source for source in sources if source["type"] == "prometheus")
    assert [place["datasourceUid"] in uids for place in prometheus["jsonData"]["exemplarTraceIdDestinations"]] == [True]


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("sum by (le, model) (rate(a_bucket{x=~\"b|c\"}[5m])) / on () group_left sum(d)", {"a_bucket", "d"}),
        ("vllm:e > 0.95 and on (instance) vllm:f > 1e3", {"vllm:e", "vllm:f"}),
        ("histogram_quantile(0.99, g) or vector(0)", {"g"}),
        ('up{job=~"by (h)"} offset 5m unless i', {"up", "i"}),
    ],
)  # fmt: skip
def test_the_series_of_an_expression_are_told(expression: str, names: set[str]) -> None:
    assert named(expression) == names
