"""What a dashboard is: rows of panels, and as Grafana's JSON. Knows no series."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PROMETHEUS = {"type": "prometheus", "uid": "forebay-prometheus"}
WIDTH, HEIGHT, STAT_HEIGHT = 24, 8, 4

Json = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One panel. `queries`: legend -> PromQL. `idle`: why a query of it may find nothing on a mesh that works; empty: it may not."""

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    note: str = ""
    stat: bool = False
    traces: bool = False  # shows exemplars
    idle: str = ""


@dataclass(frozen=True)
class Variable:
    """A choice at the top of a dashboard: values of `label` of a series."""

    name: str
    series: str
    label: str
    title: str


@dataclass(frozen=True)
class Dashboard:
    """Rows of panels; those of a row share its width."""

    uid: str
    title: str
    note: str
    rows: Sequence[tuple[str, Sequence[Panel]]]
    variables: Sequence[Variable] = field(default_factory=tuple)

    @property
    def panels(self) -> Iterator[Panel]:
        """All of them, in order."""
        return (panel for _, panels in self.rows for panel in panels)


def rendered(dashboard: Dashboard) -> str:
    """The file's text."""
    return json.dumps(_dashboard(dashboard), indent=1, ensure_ascii=False) + "\n"


def _dashboard(dashboard: Dashboard) -> Json:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.note,
        "tags": ["forebay"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["forebay"], "title": "Forebay", "asDropdown": True, "includeVars": True}],
        "templating": {"list": [_variable(variable) for variable in dashboard.variables]},
        "panels": list(_placed(dashboard)),
    }


def _variable(variable: Variable) -> Json:
    query = f"label_values({variable.series}, {variable.label})"
    return {
        "name": variable.name,
        "label": variable.title,
        "type": "query",
        "datasource": PROMETHEUS,
        "definition": query,
        "query": {"query": query, "refId": variable.name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _placed(dashboard: Dashboard) -> Iterator[Json]:
    """Every row's heading and, below it, its panels from left to right."""
    number, y = 1, 0
    for title, panels in dashboard.rows:
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": _place(0, y, WIDTH, 1)}
        number, y = number + 1, y + 1
        width, height = WIDTH // len(panels), STAT_HEIGHT if panels[0].stat else HEIGHT
        for index, panel in enumerate(panels):
            yield {"id": number, **_panel(panel), "gridPos": _place(index * width, y, width, height)}
            number += 1
        y += height


def _place(x: int, y: int, width: int, height: int) -> Json:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel) -> Json:
    options: Json = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    if panel.stat:
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "colorMode": "value"}
    bounds: Json = {"min": 0, "max": 1} if panel.unit == "percentunit" and not panel.stat and panel.title not in _UNBOUNDED else {"min": 0}
    return {
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": "; ".join(filter(None, (panel.note, panel.idle and f"May be empty: {panel.idle}."))),
        "datasource": PROMETHEUS,
        "fieldConfig": {"defaults": {"unit": panel.unit, **bounds}, "overrides": []},
        "options": options,
        "targets": [_target(chr(ord("A") + index), *query, panel.traces) for index, query in enumerate(panel.queries.items())],
    }


_UNBOUNDED = frozenset({"CPU", "Error of foretold steps"})  # shares that may be over 1


def _target(letter: str, legend: str, expression: str, traces: bool) -> Json:
    return {"refId": letter, "datasource": PROMETHEUS, "expr": expression, "legendFormat": legend or "__auto", "exemplar": traces}
