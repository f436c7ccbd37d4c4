"""Settings: read from the environment, and refused in one line."""

import pytest
from pydantic import Field

from services.common.settings import HostPort, HostPorts, ServiceSettings, SettingsError, listed, read


class Example(ServiceSettings):
    """A service's settings."""

    count: int = Field(ge=1, description="how many")
    url: str = Field("", pattern="^(https://.*)?$", description="where")
    peer: HostPort | None = Field(None, description="whom")
    peers: HostPorts = Field("", description="whom all")


def test_a_variable_is_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_COUNT", "3")
    assert read(Example).count == 3


def test_a_bad_value_is_named_with_its_variable_and_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_COUNT", "0")
    with pytest.raises(SettingsError, match=r"^FOREBAY_COUNT=0: input should be greater than or equal to 1 \(how many\)$"):
        read(Example)


def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOREBAY_COUNT", raising=False)
    with pytest.raises(SettingsError, match=r"^FOREBAY_COUNT: field required"):
        read(Example)


def test_a_value_that_may_hold_a_password_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_COUNT", "1")
    monkeypatch.setenv("FOREBAY_URL", "redis://:secret@host")
    with pytest.raises(SettingsError) as caught:
        read(Example)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("variable", "value"), [("INTERNAL_ADDRESS", "here"), ("PEER", "here:99999"), ("PEERS", "a:1,b")])
def test_an_address_that_is_none_is_one_line(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv("FOREBAY_COUNT", "1")
    monkeypatch.setenv(f"FOREBAY_{variable}", value)
    with pytest.raises(SettingsError, match=rf"^FOREBAY_{variable}={value}: not host:port, such as") as caught:
        read(Example)
    assert str(caught.value).count("not host:port") == 1


def test_a_list_comes_apart_without_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_COUNT", "1")
    monkeypatch.setenv("FOREBAY_PEERS", "a:1, b:2,,a:1")
    assert listed(read(Example).peers) == ["a:1", "b:2"]
