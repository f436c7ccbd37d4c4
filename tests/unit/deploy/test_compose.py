"""The Compose files fit the services: names of settings, ports, probes; and no container may do more than it must."""

import re
import tomllib
import urllib.parse
from pathlib import PurePosixPath

import pytest
import yaml

from services.cli import authority
from services.common.settings import ServiceSettings, read
from services.gateway.settings import GatewaySettings
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings
from tests.unit.deploy.stack import CORE, DEPLOY, DOCKERFILE, OBSERVERS, OVERLAY, SERVICES, addresses, filled, stages

SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "scheduler-1": SchedulerSettings,
    "scheduler-2": SchedulerSettings,
    "worker-1": WorkerSettings,
    "worker-2": WorkerSettings,
    "worker-cuda": WorkerSettings,
}
OURS = [*SETTINGS, "valkey"]


@pytest.mark.parametrize("service", SETTINGS)
def test_the_settings_class_takes_what_a_service_gets(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = SERVICES[service]["environment"]
    known = {f"FOREBAY_{name.upper()}" for name in SETTINGS[service].model_fields}
    assert set(environment) <= known, "a variable that nobody reads"
    for name, value in environment.items():
        monkeypatch.setenv(name, filled(value))
    read(SETTINGS[service])


def test_the_overlay_adds_standard_variables_to_every_service() -> None:
    for service in SETTINGS:
        added = OVERLAY["services"][service]["environment"]
        assert added["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4317"
        assert all(name.startswith("OTEL_") for name in added)
    assert set(OVERLAY["services"]) == {*SETTINGS, *OBSERVERS}


def _listens(service: str) -> set[str]:
    faces = ("FOREBAY_LISTEN_ADDRESS", "FOREBAY_GRPC_ADDRESS", "FOREBAY_HTTP_ADDRESS", "FOREBAY_INTERNAL_ADDRESS")
    return {address.rpartition(":")[2] for address in addresses(service, *faces)}


def test_addresses_name_services_and_ports_that_listen() -> None:
    asked = [address for service in SETTINGS for address in addresses(service, "_SCHEDULERS", "_ADVERTISED_ADDRESS")]
    asked += addresses("bench", "FOREBAY_ADDRESS")
    asked.append(urllib.parse.urlsplit(SERVICES["bench"]["environment"]["FOREBAY_HTTP_URL"]).netloc)
    assert len(asked) == 2 * 4 + 3 + 2
    for address in asked:
        service, _, port = address.partition(":")
        assert port in _listens(service), address


def test_workers_are_told_apart() -> None:
    workers = [name for name in SETTINGS if name.startswith("worker")]
    assert [SERVICES[name]["environment"]["FOREBAY_WORKER_ID"] for name in workers] == workers
    assert [SERVICES[name]["environment"]["FOREBAY_ADVERTISED_ADDRESS"] for name in workers] == [f"{name}:50061" for name in workers]


@pytest.mark.parametrize("service", [name for name in SETTINGS if name.startswith("worker")])
def test_what_a_worker_died_with_outlives_its_container(service: str) -> None:
    record = PurePosixPath(SERVICES[service]["environment"]["FOREBAY_FLIGHT_RECORD_FILE"])
    assert record.stem == service, "its own"
    assert f"workers:{record.parent}" in SERVICES[service]["volumes"]
    assert "workers" in CORE["volumes"]
    assert f"mkdir {record.parent} && chown forebay: {record.parent}" in DOCKERFILE, "a new volume is its image's folder's owner's"


def test_a_second_model_that_embeds_is_served_where_it_is_named() -> None:
    named = {"FOREBAY_MODEL_FILE": "m.gguf", "FOREBAY_MODEL_NAME": "chat", "FOREBAY_MODEL_DIR": "/m"}
    both = {**named, "FOREBAY_EMBEDDING_DIR": "/e", "FOREBAY_EMBEDDING_NAME": "vectors"}
    for service, name in [("gateway", "FOREBAY_MODELS"), ("worker-1", "FOREBAY_MODEL"), ("worker-cuda", "FOREBAY_MODEL")]:
        assert filled(SERVICES[service]["environment"][name], **named) == "/models/m.gguf=chat"
        assert filled(SERVICES[service]["environment"][name], **both) == "/models/m.gguf=chat,/embedding=vectors"
        assert "/e:/embedding:ro" in [filled(volume, **both) for volume in SERVICES[service]["volumes"]]
        assert "/m:/embedding:ro" in [filled(volume, **named) for volume in SERVICES[service]["volumes"]], "something must be mounted"


def test_valkey_listens_where_schedulers_look() -> None:
    for service in ("scheduler-1", "scheduler-2"):
        url = urllib.parse.urlsplit(SERVICES[service]["environment"]["FOREBAY_REDIS_URL"])
        assert (url.hostname, url.port, url.password) == ("valkey", 6379, None), "the password is in a file"
    assert "6379" in (DEPLOY / "valkey" / "health.py").read_text()
    assert "port " not in (DEPLOY / "valkey" / "valkey.conf").read_text(), "6379 is Valkey's own"


@pytest.mark.parametrize("service", SETTINGS)
def test_a_service_has_the_key_of_its_role_and_no_other(service: str) -> None:
    role = service.partition("-")[0]
    definition = SERVICES[service]
    files = [definition["environment"][f"FOREBAY_TLS_{part}_FILE"] for part in ("CERT", "KEY", "CA")]
    assert files == [f"/run/secrets/{name}" for name in (f"{role}.pem", f"{role}.key", "ca.pem")]
    assert sorted(name for name in definition["secrets"] if name != "valkey_password") == sorted(["ca.pem", f"{role}.pem", f"{role}.key"])


def test_prometheus_asks_every_service_on_its_internal_port() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    scraped = {target for job in config["scrape_configs"] for part in job["static_configs"] for target in part["targets"]}
    listening = {f"{name}:9090" for name in SETTINGS if name not in ("gateway", "worker-cuda")}
    assert scraped == listening | set(addresses("gateway", "FOREBAY_INTERNAL_ADDRESS")) | {"127.0.0.1:9090"}
    assert all(job.get("metrics_path", "/metrics") == "/metrics" for job in config["scrape_configs"])


@pytest.mark.parametrize("service", SETTINGS)
def test_health_is_asked_of_the_process_itself(service: str) -> None:
    *command, program = SERVICES[service]["healthcheck"]["test"]
    assert command == ["CMD", "python3", "-ISc"]
    assert "FOREBAY_INTERNAL_ADDRESS" in program
    assert "GET /health " in program


@pytest.mark.parametrize("service", [*OURS, *OBSERVERS])
def test_no_health_check_calls_a_peer(service: str) -> None:
    check = str(SERVICES[service].get("healthcheck", {}).get("test", ""))
    if service == "valkey":
        check += (DEPLOY / "valkey" / "health.py").read_text()
    named = {other for other in SERVICES if re.search(rf"['\"/ ]{other}[:'\"/]", check)} - {service}
    assert not named


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_may_do_no_more_than_it_must(service: str) -> None:
    definition = SERVICES[service]
    assert definition["read_only"] is True
    assert definition["cap_drop"] == ["ALL"]
    assert definition["security_opt"] == ["no-new-privileges:true"]
    assert re.fullmatch(r"\d+:\d+", definition["user"])
    assert not definition["user"].startswith("0:")
    assert float(filled(definition["cpus"])) > 0
    assert re.fullmatch(r"\d+[mg]", filled(definition["mem_limit"]))
    assert definition["pids_limit"] > 0
    assert not definition.get("privileged")


def test_only_the_gateway_is_published_and_only_on_this_machine() -> None:
    published = {name: definition["ports"] for name, definition in CORE["services"].items() if "ports" in definition}
    assert list(published) == ["gateway"]
    assert [filled(port) for port in published["gateway"]] == ["127.0.0.1:50051:50051", "127.0.0.1:8000:8000"]
    for observer in OBSERVERS:
        assert all(port.startswith("127.0.0.1:") for port in OVERLAY["services"][observer].get("ports", []))


def test_networks_keep_apart_who_has_nothing_to_say() -> None:
    members = {name: [service for service, d in CORE["services"].items() if name in d["networks"]] for name in CORE["networks"]}
    assert members["store"] == ["valkey", "scheduler-1", "scheduler-2"]
    assert members["front"] == ["gateway", "bench"]
    assert [name for name, network in CORE["networks"].items() if network.get("internal")] == ["store", "mesh"]


def test_images_are_pinned() -> None:
    version = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["version"]
    for service, definition in SERVICES.items():
        repository, _, tag = definition["image"].partition(":")
        assert re.match(r"v?\d+\.\d+\.\d+", tag), f"{service}: {definition['image']}"
        assert ("build" in definition) == (repository.startswith("forebay-"))
        if "build" in definition:
            assert tag == version
    assert "FROM python:3.11-slim-bookworm\n" in stages()["base"]


def test_every_target_exists_and_runs_as_nobody_in_particular() -> None:
    for service in [*OURS, "bench"]:
        target = SERVICES[service]["build"]["target"]
        assert "\nUSER 10001:10001\n" in stages()[target], target
        assert SERVICES[service]["image"].startswith(f"forebay-{target}:")


def test_mounted_files_are_in_the_checkout_or_made_before_the_start() -> None:
    made = {f"./secrets/{name}" for name in ("valkey_password", "grafana_password", "token", "jwks.json", "ca.pem")}
    made |= {f"./secrets/{role}.{part}" for role in authority.ROLES for part in ("pem", "key")}
    mounted = {filled(volume.split(":")[0]) for name in OBSERVERS for volume in SERVICES[name].get("volumes", []) if volume[0] == "."}
    assert mounted
    assert all((DEPLOY / path).exists() for path in mounted), mounted
    files = [entry["file"] for part in (CORE["secrets"], CORE["configs"], OVERLAY["secrets"]) for entry in part.values()]
    assert {filled(file) for file in files} == made
