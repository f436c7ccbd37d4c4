"""What options take; `test_app` has what they say of the rest."""

from collections.abc import Callable

import pytest

from services.cli import options
from services.cli.problem import Usage


@pytest.mark.parametrize(
    ("parse", "given", "value"),
    [
        (options.whole("-n", -3, 3), "-3", -3),
        (options.whole("-n", -3, 3), 3, 3),
        (options.real("-x", 0, 100), "1e2", 100.0),
        (options.choice("-c", ("a", "b")), "b", "b"),
        (options.memory("-m"), "512MB", "512MB"),
        (options.memory("-m"), "2GiB", "2GiB"),
        (options.memory("-m"), "1000000", "1000000"),
        (options.span("-s"), "90s", 90.0),
        (options.span("-s"), "30d", 2_592_000.0),
        (options.text("-t"), "Grüße 😀", "Grüße 😀"),
    ],
)
def test_what_they_take(parse: Callable[[object], object], given: object, value: object) -> None:
    assert parse(given) == value


@pytest.mark.parametrize(
    ("parse", "given"),
    [
        *((options.whole("-n", -3, 3), given) for given in ("4", "-4", "1.5", "", "1_", "x" * 1000, "\n")),
        *((options.real("-x", 0, 100), given) for given in ("-0.1", "100.1", "inf", "nan", "1e999", "", "a")),
        *((options.choice("-c", ("a", "b")), given) for given in ("c", "", "A")),
        *((options.memory("-m"), given) for given in ("0", "-1MB", "MB", "1 potato", "", "nan")),
        *((options.span("-s"), given) for given in ("0s", "-1d", "1", "d", "1.5h", "3651d", "9" * 20 + "s", "1y", "", "٣d")),
        (options.text("-t"), "a\udcff"),
    ],
)
def test_what_they_refuse_in_one_short_line(parse: Callable[[object], object], given: str) -> None:
    with pytest.raises(Usage) as caught:
        parse(given)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200
