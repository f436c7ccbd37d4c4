"""Every panel and every rule against a real Prometheus that scrapes a real mesh under load: none empty, none failing.

Needs `prometheus` in PATH. Prints JSON lines {"figure", "value", "unit", "target", "holds"}, names what is wrong on stderr, and then
exits with 1.
"""

import argparse
import asyncio
import json
import math
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.figure import line, show
from bench.mesh import Mesh, internal_addresses, started
from bench.traffic import Traffic
from tools.dashboards.__main__ import DASHBOARDS
from tools.series import OF_PROMETHEUS, exported, named

DEPLOY = Path(__file__).parents[1] / "deploy" / "prometheus"
POLICY = """
tiers:
  open: {}
  metered: {requests_per_minute: 30}
default_tier: open
orgs:
  acme: {tier: open}
  meter: {tier: metered}
"""
SMALL = {"FOREBAY_MAX_SEQUENCES": "4", "FOREBAY_MAX_QUEUED": "6", "FOREBAY_HOST_MEMORY": "32MB", "FOREBAY_KV_MEMORY": "24MB"}
"""So that 24 clients queue, preempt and are shed, and what the cache evicts comes back from the host."""
TRACED = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
"""Nobody takes the spans; latencies bear their traces all the same."""
VARIABLES = {"$__rate_interval": "15s", "$org": ".*", "$instance": ".*", "$model": ".*"}
_READY_SECONDS = 20.0


@dataclass(frozen=True)
class Prometheus:
    """A server on loopback."""

    url: str

    def ask(self, path: str, **query: str) -> Any:
        """The API's data. Raises ValueError with its words for an expression that it refuses."""
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]) from None

    def values(self, expression: str) -> list[float]:
        """What an expression comes to now, without what is no number."""
        values = [float(row["value"][1]) for row in self.ask("query", query=filled(expression))["result"]]
        return [value for value in values if not math.isnan(value)]

    def exemplars(self, expression: str, start: float, end: float) -> list[str]:
        """Trace ids that the expression's series bear, of this time."""
        series = self.ask("query_exemplars", query=filled(expression), start=str(start), end=str(end))
        return [exemplar["labels"]["trace_id"] for row in series for exemplar in row["exemplars"]]


def filled(expression: str) -> str:
    """With values for Grafana's variables."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression


def configuration(addresses: Mapping[str, str]) -> dict[str, Any]:
    """deploy's, with this mesh's addresses under the same job names, and more often."""
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / pattern) for pattern in config["rule_files"]]
    jobs: dict[str, list[str]] = {}
    for name, address in addresses.items():
        jobs.setdefault(f"forebay-{name.partition('-')[0]}", []).append(address)
    assert set(jobs) < {job["job_name"] for job in config["scrape_configs"]}, jobs
    config["scrape_configs"] = [{"job_name": job, "static_configs": [{"targets": targets}]} for job, targets in jobs.items()]
    return config


@contextmanager
def prometheus(config: Mapping[str, Any]) -> Iterator[Prometheus]:
    """Debian's, for as long as the block."""
    program = shutil.which("prometheus")
    if program is None:
        sys.exit("no prometheus in PATH: apt-get install --no-install-recommends prometheus")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory(prefix="forebay-prometheus-") as folder:
        file = Path(folder) / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        command = [program, f"--config.file={file}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
        process = subprocess.Popen([*command, "--enable-feature=exemplar-storage", "--log.level=warn"])
        try:
            server = Prometheus(f"http://{address}")
            _wait_for(server, process)
            yield server
        finally:
            process.terminate()
            process.wait(timeout=20)


def _wait_for(server: Prometheus, process: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + _READY_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{server.url}/-/ready", timeout=1):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > until:
                sys.exit("prometheus did not start")
            time.sleep(0.1)


def empty_panels(server: Prometheus) -> list[str]:
    """Of those that may not be."""
    found = []
    for name, dashboard in DASHBOARDS.items():
        for panel in dashboard.panels:
            for legend, expression in panel.queries.items():
                if not panel.idle and not server.values(expression):
                    found.append(f"{name}: {panel.title} {legend}: {expression}")
    return found


def unknown_series(server: Prometheus) -> list[str]:
    """What panels and rules read, and neither Prometheus has nor any service would export."""
    known = {*server.ask("label/__name__/values"), *exported(), *OF_PROMETHEUS}
    read = {expression for dashboard in DASHBOARDS.values() for panel in dashboard.panels for expression in panel.queries.values()}
    read |= {rule["query"] for rule in rules(server)}
    return sorted({name for expression in read for name in named(expression)} - known)


def rules(server: Prometheus) -> list[dict[str, Any]]:
    """All of them, as Prometheus has read and evaluated them."""
    return [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]


def broken_rules(server: Prometheus) -> list[str]:
    """Those that couldn't be evaluated, and recording rules that record nothing."""
    failing = [f"{rule['name']}: {rule.get('lastError')}" for rule in rules(server) if rule["health"] != "ok"]
    silent = [rule["name"] for rule in rules(server) if rule["type"] == "recording" and not server.values(rule["name"])]
    return failing + silent


def missing_exemplars(server: Prometheus) -> list[str]:
    """Panels that are to lead to traces, and lead to none."""
    now = time.time()
    traced = [(name, panel) for name, dashboard in DASHBOARDS.items() for panel in dashboard.panels if panel.traces]
    return [
        f"{name}: {panel.title}"
        for name, panel in traced
        if not any(server.exemplars(expression, now - 60, now) for expression in panel.queries.values())
    ]


def down_targets(server: Prometheus) -> list[str]:
    """Those that a scrape has failed of."""
    return [target["scrapeUrl"] for target in server.ask("targets")["activeTargets"] if target["health"] != "up"]


async def _look_under_load(mesh: Mesh, server: Prometheus, seconds: float) -> dict[str, list[str]]:
    """What is wrong, by figure, while the load goes on."""
    load = asyncio.create_task(Traffic(mesh, ("acme", "meter", "birch")).run(clients=24, seconds=seconds + 10))
    await asyncio.sleep(seconds)
    checks = {
        "panels_empty": empty_panels,
        "panels_traceless": missing_exemplars,
        "series_unknown": unknown_series,
        "rules_broken": broken_rules,
        "targets_down": down_targets,
    }
    found = {name: await asyncio.to_thread(check, server) for name, check in checks.items()}
    load.cancel()
    await asyncio.wait({load})
    return found


def main() -> None:
    """Starts a mesh and Prometheus, looks, and says what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.dashboards", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of load before the look")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy.yaml"
        policy.write_text(POLICY)
        with (
            started(["--workers", "2", "--policy", str(policy)], {**SMALL, **TRACED}) as mesh,
            prometheus(configuration(internal_addresses(mesh))) as server,
        ):
            found = asyncio.run(_look_under_load(mesh, server, arguments.seconds))
            show(line("panels_checked", sum(1 for dashboard in DASHBOARDS.values() for _ in dashboard.panels), "panels"))
            show(line("rules_checked", len(rules(server)), "rules"))
    for name, wrong in found.items():
        show(line(name, len(wrong), name.partition("_")[0], 0.0, at_most=True))
        for what in wrong:
            print(f"{name}: {what}", file=sys.stderr)
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
