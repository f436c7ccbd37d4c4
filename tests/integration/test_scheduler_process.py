"""`python -m services.scheduler`: says where it listens, stops in order, and names what is wrong in one line."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest

from services.scheduler import keys

COMMAND = [sys.executable, "-m", "services.scheduler"]


def _environment(**settings: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    return {**inherited, "FOREBAY_LISTEN_ADDRESS": "127.0.0.1:0", **{f"FOREBAY_{name.upper()}": value for name, value in settings.items()}}


@pytest.fixture
def process(redis_server) -> Iterator[subprocess.Popen[str]]:
    environment = _environment(redis_url=redis_server.url, scheduler_id="s7")
    process = subprocess.Popen(COMMAND, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_it_listens_and_stops_on_a_signal(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    line = json.loads(process.stdout.readline())
    assert (line["event"], line["service"]) == ("listening", "scheduler")
    host, port = line["address"].split(":")
    with socket.create_connection((host, int(port)), timeout=5):
        pass
    for path, words in (("/ready", "ready"), ("/metrics", "forebay_leases 0.0")):
        with urllib.request.urlopen(f"http://{line['internal_address']}{path}", timeout=5) as response:
            assert words in response.read().decode()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert output == "", "nothing else on standard output"


def _fail(**settings: str) -> tuple[int, str]:
    ended = subprocess.run(COMMAND, env=_environment(**settings), capture_output=True, text=True, timeout=40, check=False)
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("{")]  # logs are JSON
    assert len(lines) == 1, ended.stderr
    return ended.returncode, lines[0]


def test_a_url_that_is_none_is_named() -> None:
    status, line = _fail(redis_url="http://example.com")
    assert status == 1
    assert "FOREBAY_REDIS_URL" in line


def test_a_redis_that_does_not_answer(tmp_path) -> None:
    status, line = _fail(redis_url=f"unix://{tmp_path}/none", redis_wait_seconds="0.1")
    assert status == 1
    assert "no Redis answers" in line
    assert "No such file or directory" in line


def test_a_ca_of_redis_that_isnt_there(tmp_path) -> None:
    status, line = _fail(redis_url=f"rediss://127.0.0.1:1/0?ssl_ca_certs={tmp_path}/none.pem", redis_wait_seconds="0.1")
    assert status == 1
    assert "no Redis answers" in line
    assert "No such file or directory" in line


def test_a_redis_of_another_schema(redis_server) -> None:
    redis_server.command(f"SET {keys.SCHEMA} 99")
    status, line = _fail(redis_url=redis_server.url)
    assert status == 1
    assert "schema 99" in line


@pytest.mark.parametrize("name", ["listen_address", "internal_address"])
def test_a_taken_port_is_named(redis_server, name: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        status, line = _fail(redis_url=redis_server.url, **{name: address})
    assert status == 1
    assert address in line


@pytest.mark.parametrize(("name", "value"), [("listen_address", "here"), ("max_queued", "0"), ("lease_seconds", "soon")])
def test_a_setting_that_makes_no_sense_is_named(name: str, value: str) -> None:
    status, line = _fail(**{name: value})
    assert status == 1
    assert line.startswith(f"forebay scheduler: FOREBAY_{name.upper()}={value}: ")


def test_the_password_comes_from_a_file(redis_server, tmp_path) -> None:
    redis_server.command("CONFIG SET requirepass s3cret")
    password = tmp_path / "password"
    password.write_text("s3cret\n")
    environment = _environment(redis_url=redis_server.url, redis_password_file=str(password))
    with subprocess.Popen(COMMAND, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "listening"
        process.terminate()
        _, logs = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "s3cret" not in logs


@pytest.mark.parametrize(("content", "words"), [(None, "can't be read"), ("\n", "is empty"), ("wrong\n", "no Redis answers")])
def test_a_password_that_is_none_is_named(redis_server, tmp_path, content: str | None, words: str) -> None:
    redis_server.command("CONFIG SET requirepass s3cret")
    password = tmp_path / "password"
    if content is not None:
        password.write_text(content)
    status, line = _fail(redis_url=redis_server.url, redis_password_file=str(password), redis_wait_seconds="0.1")
    assert status == 1
    assert words in line
