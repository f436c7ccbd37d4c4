"""Settings come from FOREBAY_* environment variables, are read once in __main__, and are then plain frozen values."""

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.common import address


def _host_port(value: str) -> str:
    address.split(value)
    return value


def _host_ports(value: str) -> str:
    for part in listed(value):
        address.split(part)
    return value


def listed(value: str) -> list[str]:
    """The parts of a comma list, without doubles."""
    return list(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))


HostPort = Annotated[str, AfterValidator(_host_port)]
HostPorts = Annotated[str, AfterValidator(_host_ports)]
"""One or more, separated by commas; `listed` takes them apart."""
PemPath = Annotated[Path | None, BeforeValidator(lambda value: value or None)]
"""An empty variable is one that isn't set."""


LOG_LEVELS = ("debug", "info", "warning", "error")


class ServiceSettings(BaseSettings):
    """What every service has. A field `x_y` is the variable FOREBAY_X_Y."""

    model_config = SettingsConfigDict(env_prefix="FOREBAY_", frozen=True, extra="ignore")

    log_level: str = Field("info", pattern=f"^({'|'.join(LOG_LEVELS)})$", description="debug, info, warning or error")
    internal_address: HostPort = Field("127.0.0.1:0", description="host:port of /metrics, /health and /ready; keep it off public networks")
    tls_cert_file: PemPath = Field(
        None, description="PEM certificate for mutual TLS inside the mesh, with its chain; for ROLE.forebay.internal: `forebay certs`"
    )
    tls_key_file: PemPath = Field(None, description="its private key")
    tls_ca_file: PemPath = Field(None, description="PEM certificates of who signs the mesh's")


Settings = TypeVar("Settings", bound=ServiceSettings)


class SettingsError(ValueError):
    """A variable is missing or wrong: one line for the person who set it."""


def read(kind: type[Settings]) -> Settings:
    """The settings of this process. SettingsError names the variable, its value and what is wrong with it."""
    try:
        return kind()  # type: ignore[call-arg]  # the environment gives the fields
    except ValidationError as error:
        problems = [_problem(kind, problem["loc"], problem["msg"], problem["input"]) for problem in error.errors()]
        raise SettingsError("; ".join(problems)) from error


def _problem(kind: type[ServiceSettings], location: tuple[int | str, ...], message: str, value: object) -> str:
    name = str(location[0]) if location else ""
    variable = f"FOREBAY_{name.upper()}"
    description = kind.model_fields[name].description if name in kind.model_fields else None
    # A value with an @ may hold a password.
    given = f"{variable}={value[:80]}" if isinstance(value, str) and "@" not in value else variable
    message = message.removeprefix("Value error, ")  # pydantic's name for what our own checks say
    return f"{given}: {message[:1].lower()}{message[1:]}" + (f" ({description})" if description else "")
