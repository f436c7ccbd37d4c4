"""Writes the Grafana dashboards Fleet, Org and Engine into deploy/grafana/dashboards. Change them here, never there.

Usage: python -m tools.dashboards
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from tools.dashboards.dashboard import Dashboard, rendered
from tools.dashboards.engine import ENGINE
from tools.dashboards.fleet import FLEET
from tools.dashboards.org import ORG

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"
DASHBOARDS: Mapping[str, Dashboard] = {"fleet": FLEET, "org": ORG, "engine": ENGINE}


def main() -> int:
    """Writes all of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, dashboard in DASHBOARDS.items():
        (FOLDER / f"{name}.json").write_text(rendered(dashboard))
        print(f"{name}: {sum(1 for _ in dashboard.panels)} panels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
