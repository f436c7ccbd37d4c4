"""A changed policy file is taken up once two looks, a second apart, find it the same; a bad change leaves the last good one."""

import os
from pathlib import Path

import pytest

from services.policy.document import PolicyError
from services.policy.policy import Policy
from services.policy.watched import PolicyFile


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def look_twice(file: PolicyFile, clock: Clock) -> None:
    """Two looks from now on."""
    for _ in range(2):
        clock.now += 1.0
        file.look()


def write(path: Path, concurrent: int | str) -> None:
    """Replaces the file, as editors and config maps do."""
    fresh = path.with_suffix(".new")
    fresh.write_text(f"orgs:\n  acme:\n    max_concurrent: {concurrent}\n")
    os.replace(fresh, path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    write(path, 1)
    return path


def test_a_change_is_taken_up_at_the_second_look(path: Path) -> None:
    clock = Clock()
    file = PolicyFile(path, clock)
    write(path, 2)
    for clock.now, concurrent in ((0.0, 1), (1.0, 1), (1.5, 1), (2.0, 2)):
        assert file.policy.org("acme").max_concurrent == concurrent


def test_a_half_written_file_that_is_a_policy_is_not_acted_on(path: Path) -> None:
    clock = Clock()
    file = PolicyFile(path, clock)
    whole = "orgs:\n  acme:\n    max_concurrent: 250\n    models: [tiny]\n"
    for clock.now, num_chars in ((1.0, whole.index("50\n")), (2.0, whole.index("    models")), (3.0, len(whole))):
        path.write_text(whole[:num_chars])
        assert file.policy.org("acme").max_concurrent == 1
    clock.now = 4.0
    assert (file.policy.org("acme").max_concurrent, file.policy.org("acme").models) == (250, ("tiny",))
    assert file.num_failures == 0


def test_a_bad_change_keeps_the_last_good_policy(path: Path) -> None:
    clock = Clock()
    file = PolicyFile(path, clock)
    write(path, "many")
    for _ in range(2):
        look_twice(file, clock)
        assert file.policy.org("acme").max_concurrent == 1
    assert file.problem.startswith(f"{path}:3: ")
    assert file.num_failures == 1
    write(path, 3)
    look_twice(file, clock)
    assert file.policy.org("acme").max_concurrent == 3
    assert file.problem == ""


@pytest.mark.parametrize("text", ["", "# limits\n", "orgs:\n"])
def test_a_file_whose_writing_has_stopped_lifts_no_limit(path: Path, text: str) -> None:
    clock = Clock()
    file = PolicyFile(path, clock)
    path.write_text(text)
    look_twice(file, clock)
    assert file.policy.org("acme").max_concurrent == 1
    assert "promises nothing" in file.problem
    write(path, 2)
    look_twice(file, clock)
    assert file.policy.org("acme").max_concurrent == 2
    assert file.problem == ""


def test_a_file_that_goes_and_comes_back_as_it_was(path: Path) -> None:
    clock = Clock()
    file = PolicyFile(path, clock)
    away = path.with_suffix(".away")
    path.rename(away)
    clock.now = 1.0
    assert file.policy.org("acme").max_concurrent == 1
    assert "No such file" in file.problem
    away.rename(path)
    look_twice(file, clock)
    assert file.policy.org("acme").max_concurrent == 1
    assert file.problem == ""


def test_a_bad_file_at_the_start_is_refused(path: Path) -> None:
    write(path, "many")
    with pytest.raises(PolicyError):
        PolicyFile(path)
    with pytest.raises(OSError, match="No such file"):
        PolicyFile(path.with_name("none"))


def test_without_a_file_nobody_is_limited() -> None:
    assert PolicyFile(None).policy == Policy()
