"""Streamed text: equal to the whole for any tokens and any grouping (B06), whole characters (B05), stop strings (B04)."""

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.text.stream import StopStrings, TextStream
from services.text import gguf_vocabulary
from services.text.gguf_metadata import read_metadata
from services.text.tokenizer import SpecialTokens, Tokenizer, Vocabulary
from tests.unit.text.vocabularies import byte_level, byte_level_fields, gguf, sentencepiece, sentencepiece_fields

Build = Callable[[Path], Tokenizer]


def build_byte_level(folder: Path) -> Tokenizer:
    (folder / "a.gguf").write_bytes(gguf(byte_level_fields()))
    return gguf_vocabulary.build(read_metadata(folder / "a.gguf", lambda _: True))


def build_sentencepiece(folder: Path) -> Tokenizer:
    (folder / "b.gguf").write_bytes(gguf(sentencepiece_fields()))
    return gguf_vocabulary.build(read_metadata(folder / "b.gguf", lambda _: True))


def streamed(
    tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str] = (), sizes: Sequence[int] = (1,)
) -> tuple[list[str], list[int]]:
    """The deltas, and the ids that were taken, of tokens pushed in groups of these sizes over and over."""
    stream, texts, taken, rest = TextStream(tokenizer, stop), [], [], list(ids)
    for size in itertools.cycle(sizes):
        if not rest:
            return [*texts, stream.finish()], taken
        piece = stream.push(rest[:size])
        texts.append(piece.text)
        taken += piece.token_ids
        if piece.stopped:
            return [*texts, stream.finish()], taken
        rest = rest[size:]
    raise AssertionError


def whole_runs(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    """Whether each run of byte tokens spells whole characters: for others the library gives up the good ones among them, too."""
    pieces = [tokenizer.token_bytes(token) if 3 <= token < 259 else None for token in ids if token > 2]
    runs = [
        b"".join(piece for piece in run if piece) for is_byte, run in itertools.groupby(pieces, lambda piece: piece is not None) if is_byte
    ]
    return all(run.decode("utf-8", "replace").encode() == run for run in runs)


@pytest.mark.parametrize(("build", "reference"), [(build_byte_level, byte_level), (build_sentencepiece, sentencepiece)])
def test_b06_500_random_id_sequences(tmp_path: Path, build: Build, reference: Callable[[], object]) -> None:
    tokenizer, backend = build(tmp_path), reference()
    rng, num_compared = random.Random(6), 0
    spaces = [token for token in range(tokenizer.vocab_size) if not tokenizer.token_text(token).strip()]
    for number in range(500):
        pool = [range(tokenizer.vocab_size), range(259, tokenizer.vocab_size), [*spaces, *range(259, 300)]][number % 3]
        ids = [rng.choice(pool) for _ in range(rng.randrange(1, 40))]
        deltas, taken = streamed(tokenizer, ids, sizes=[rng.randrange(1, 5) for _ in range(3)])
        assert taken == ids
        prompt = tokenizer.encode("a prompt")
        assert tokenizer.decode(prompt) + "".join(deltas) == tokenizer.decode([*prompt, *ids])
        if reference is byte_level or whole_runs(tokenizer, ids):
            num_compared += 1
            assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=True)  # type: ignore[attr-defined]
    assert num_compared > 300


@pytest.mark.parametrize("build", [build_byte_level, build_sentencepiece])
@pytest.mark.parametrize("text", ["🎉", "👨‍👩‍👧‍👦", "日本語", "🇩🇪🇫🇷", "é\u0301", " leading", "  two", "a\n\n.b", "naïve ☃ end"])
def test_b05_whole_characters_one_token_per_message(tmp_path: Path, build: Build, text: str) -> None:
    tokenizer = build(tmp_path)
    ids = tokenizer.encode("x" + text, add_special=False)
    deltas, _ = streamed(tokenizer, ids)
    assert "".join(deltas).removeprefix(" ") == "x" + text
    assert all("\ufffd" not in delta for delta in deltas)


@pytest.mark.parametrize("build", [build_byte_level, build_sentencepiece])
def test_b05_an_end_inside_a_character_shows_once(tmp_path: Path, build: Build) -> None:
    tokenizer = build(tmp_path)
    by_byte = {tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.vocab_size))}
    ids = [by_byte[bytes([byte])] for byte in "🎉".encode()]
    for length in range(1, 4):
        stream = TextStream(tokenizer)
        assert stream.push(ids[:length]).text == ""
        assert set(stream.finish()) == {"\ufffd"}


def letters() -> Tokenizer:
    """A token per ASCII character, then some of several letters, then a special one."""
    pieces = [bytes([byte]) for byte in range(128)] + [b"DEF", b"GHI", b"ABCDEFGHIJKL", b"<end>"]
    return Tokenizer(byte_level(), Vocabulary(pieces, SpecialTokens(frozenset({131}))))


ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def ids_of(text: str) -> list[int]:
    return list(text.encode())


class TestB04:
    """Stop strings."""

    @pytest.mark.parametrize("sizes", [[1], [2], [3, 1], [26]])
    def test_no_character_of_a_stop_is_sent(self, sizes: list[int]) -> None:
        deltas, taken = streamed(letters(), ids_of(ALPHABET), ["DEFGHIJ"], sizes)
        assert "".join(deltas) == "ABC"
        assert taken == ids_of("ABCDEFGHIJ")

    def test_the_tokens_end_with_the_one_that_completes_it(self) -> None:
        ids = [*ids_of("ABC"), 128, 129, *ids_of("JKL")]
        assert streamed(letters(), ids, ["DEFGHIJ"]) == (["A", "B", "C", "", "", "", ""], ids[:6])
        assert streamed(letters(), [130, 65], ["DEF"]) == (["ABC", ""], [130])

    def test_half_a_match_is_flushed_at_the_end(self) -> None:
        deltas, _ = streamed(letters(), ids_of("ABCDEFGHI"), ["DEFGHIJ"])
        assert deltas == ["A", "B", "C", *[""] * 6, "DEFGHI"]

    def test_a_match_that_fails_is_let_go_at_once(self) -> None:
        deltas, _ = streamed(letters(), ids_of("aabaabx"), ["aabaac"])
        assert "".join(deltas) == "aabaabx"
        assert deltas[:6] == ["", "", "", "", "", "aab"]

    def test_special_tokens_do_not_break_a_match(self) -> None:
        assert streamed(letters(), [68, 131, 69, 70], ["DEF"])[0] == ["", "", "", "", ""]

    def test_nothing_follows_a_stop(self) -> None:
        stream = TextStream(letters(), ["B"])
        assert stream.push(ids_of("ABC")).stopped
        assert stream.finish() == ""
        with pytest.raises(AssertionError):
            stream.push([65])

    def test_a_stop_of_characters_that_come_in_bytes(self) -> None:
        tokenizer = Tokenizer(byte_level(), Vocabulary([bytes([byte]) for byte in range(256)]))
        assert streamed(tokenizer, list("né🎉x".encode()), ["🎉"])[0] == ["n", "", "é", "", "", "", "", ""]


def first_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the stop that is complete first; of those, before the longest. By trying every end."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), max_size=4), st.lists(st.integers(1, 5), min_size=1))
def test_stops_equal_a_search_in_the_whole_text(text: str, stops: list[str], sizes: list[int]) -> None:
    deltas, taken = streamed(letters(), ids_of(text), stops, sizes)
    expected = first_stop(text, stops)
    assert "".join(deltas) == expected
    assert "".join(map(chr, taken)).startswith(expected)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4))
def test_only_what_may_become_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    cutter, sent = StopStrings(stops), ""
    for end in range(1, len(text) + 1):
        safe, stopped = cutter.push(text[end - 1])
        sent += safe
        if stopped:
            return
        held = text[len(sent) : end]
        assert not held or any(stop.startswith(held) for stop in stops)
