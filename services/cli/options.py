"""Parsers of option values. Each refuses what it doesn't take in one line that names the option, the value and what may stand there."""

import re
from collections.abc import Callable

from services.cli.problem import Usage

_SPAN = re.compile(r"([0-9]{1,9})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MOST_DAYS = 3650


def whole(option: str, least: int, most: int) -> Callable[[object], int]:
    """A whole number from `least` to `most`."""

    def parse(given: object) -> int:
        try:
            number = int(str(given))
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            raise Usage(f"{option} is {shown(given)}: it must be a whole number from {least} to {most}")
        return number

    return parse


def real(option: str, least: float, most: float) -> Callable[[object], float]:
    """A number from `least` to `most`, neither NaN nor infinite."""

    def parse(given: object) -> float:
        try:
            number = float(str(given))
        except ValueError:
            number = float("nan")
        if not least <= number <= most:  # NaN is in no range
            raise Usage(f"{option} is {shown(given)}: it must be a number from {least:g} to {most:g}")
        return number

    return parse


def choice(option: str, words: tuple[str, ...]) -> Callable[[object], str]:
    """One of `words`."""

    def parse(given: object) -> str:
        if given not in words:
            raise Usage(f"{option} is {shown(given)}: it must be {', '.join(words[:-1])} or {words[-1]}")
        return str(given)

    return parse


def span(option: str) -> Callable[[object], float]:
    """A time of more than 0 and at most ten years, in seconds, minutes, hours or days: 90s, 45m, 12h, 30d."""

    def parse(given: object) -> float:
        form = _SPAN.fullmatch(str(given))
        seconds = int(form[1]) * _UNITS[form[2]] if form else 0
        if not 0 < seconds <= _MOST_DAYS * _UNITS["d"]:
            raise Usage(f"{option} is {shown(given)}: it must be a time such as 90s, 45m, 12h or 30d, of at most {_MOST_DAYS} days")
        return float(seconds)

    return parse


def memory(option: str) -> Callable[[object], str]:
    """A size in bytes over 0, with a unit or without, in the words that a worker reads it in."""

    def parse(given: object) -> str:
        from pydantic import ByteSize, TypeAdapter, ValidationError  # here, as it costs other commands a tenth of a second

        try:
            size = TypeAdapter(ByteSize).validate_python(str(given))
        except ValidationError:
            size = ByteSize(0)
        if size <= 0:
            raise Usage(f"{option} is {shown(given)}: it must be a size over 0, such as 512MB or 2GiB")
        return str(given)

    return parse


def text(option: str) -> Callable[[object], str]:
    """Any text that was UTF-8."""
    return lambda given: utf8(str(given), option)


def utf8(given: str, where: str) -> str:
    """`given`, as it came from the operating system; Usage where its bytes were no UTF-8."""
    try:
        given.encode()
    except UnicodeEncodeError as error:
        # What can't be decoded comes as lone surrogates, U+DC80 for byte 0x80.
        byte = ord(given[error.start]) & 0xFF
        raise Usage(f"{where} isn't UTF-8 (byte 0x{byte:02x} at position {error.start}): convert it, with iconv say") from None
    return given


def shown(given: object) -> str:
    """A value in a message: one short line, whatever it holds."""
    words = str(given)
    plain = words if words.isprintable() and words else ascii(words)
    return plain if len(plain) <= 80 else plain[:77] + "..."
