"""The look at a live Prometheus names what is wrong: empty panels, series that nobody has, rules that fail or record nothing."""

from typing import Any

import pytest

from bench.dashboards import Prometheus, broken_rules, configuration, down_targets, empty_panels, missing_exemplars, unknown_series

GOOD = {"name": "forebay:errors:ratio_rate5m", "query": "sum(forebay_requests_total)", "type": "recording", "health": "ok"}


class Answers(Prometheus):
    """A Prometheus that has `values` for everything but what names one of `missing`."""

    def __init__(self, values: list[str], missing: tuple[str, ...] = (), rules: list[dict[str, Any]] | None = None) -> None:
        super().__init__("http://nowhere")
        object.__setattr__(self, "answers", (values, missing, rules or []))

    def ask(self, path: str, **query: str) -> Any:
        values, missing, rules = self.answers  # type: ignore[attr-defined]
        match path:
            case "rules":
                return {"groups": [{"rules": rules}]}
            case "label/__name__/values":
                return []
            case "query_exemplars":
                assert "$" not in query["query"]
                gone = any(name in query["query"] for name in missing)
                return [] if gone else [{"exemplars": [{"labels": {"trace_id": "ab"}}]}]
            case "targets":
                return {"activeTargets": [{"scrapeUrl": "a", "health": "up"}, {"scrapeUrl": "b", "health": "down"}]}
        assert "$" not in query["query"], "Grafana's variables are filled in"
        gone = any(name in query["query"] for name in missing)
        return {"result": [] if gone else [{"value": [0, value]} for value in values]}


def test_an_empty_panel_is_named() -> None:
    assert empty_panels(Answers(["1"])) == []
    found = empty_panels(Answers(["1"], ("forebay_leases",)))
    assert [line.partition(":")[0] for line in found] == ["fleet"]
    assert "forebay_leases" in found[0]


def test_a_panel_that_leads_to_no_trace_is_named() -> None:
    assert missing_exemplars(Answers(["1"])) == []
    assert missing_exemplars(Answers(["1"], ("forebay_queue_wait_seconds",))) == ["fleet: Wait until placed"]


def test_what_is_no_number_is_empty() -> None:
    assert Answers(["NaN", "2"]).values("a") == [2]
    assert len(empty_panels(Answers(["NaN"]))) > 50


def test_a_panel_that_may_be_empty_is_not_named() -> None:
    assert empty_panels(Answers(["1"], ("DCGM_", "forebay_shed_total", "forebay_host_temperature_celsius"))) == []


@pytest.mark.parametrize(
    ("rule", "missing", "wrong"),
    [
        (GOOD, (), []),
        ({**GOOD, "health": "err", "lastError": "bad"}, (), [f"{GOOD['name']}: bad"]),
        (GOOD, (GOOD["name"],), [GOOD["name"]]),
        ({**GOOD, "type": "alerting"}, (GOOD["name"],), []),
    ],
    ids=["good", "failing", "silent", "an alert may be silent"],
)
def test_a_rule_that_fails_or_records_nothing_is_named(rule: dict[str, Any], missing: tuple[str, ...], wrong: list[str]) -> None:
    assert broken_rules(Answers(["1"], missing, [rule])) == wrong


def test_a_series_that_nobody_has_is_named() -> None:
    rule = {**GOOD, "query": "rate(forebay_nonsense_total[5m])"}
    assert "forebay_nonsense_total" in unknown_series(Answers(["1"], rules=[rule]))


def test_a_target_that_is_down_is_named() -> None:
    assert down_targets(Answers(["1"])) == ["b"]


def test_jobs_are_those_of_the_deployment() -> None:
    config = configuration({"gateway": "127.0.0.1:1", "scheduler": "127.0.0.1:2", "worker-1": "127.0.0.1:3", "worker-2": "127.0.0.1:4"})
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    assert targets["forebay-worker"] == ["127.0.0.1:3", "127.0.0.1:4"]
    assert set(targets) == {"forebay-gateway", "forebay-scheduler", "forebay-worker"}
