"""API keys: long enough, told apart from slips, kept as a hash."""

import hashlib

import pytest

from services.policy import api_key


def test_keys_are_whole_and_differ() -> None:
    keys = {api_key.make() for _ in range(1000)}
    assert len(keys) == 1000
    assert all(api_key.is_key(key) and len(key) == 52 for key in keys)


@pytest.mark.parametrize("place", range(3, 52))
def test_a_slip_is_no_key(place: int) -> None:
    key = api_key.make()
    other = "b" if key[place] == "a" else "a"
    assert not api_key.is_key(key[:place] + other + key[place + 1 :])


@pytest.mark.parametrize("text", ["", "fb_", "fb_" + "0" * 48, "sk-" + "0" * 49, "fb_" + "ä" * 49])
def test_what_is_no_key(text: str) -> None:
    assert not api_key.is_key(text)


def test_the_hash_is_sha256_of_the_whole_key() -> None:
    key = api_key.make()
    assert api_key.key_hash(key) == hashlib.sha256(key.encode()).digest()
