"""`forebay embed` against a gateway in this process: what it sends, what it prints."""

import json

import pytest
from typer.testing import CliRunner

from services.cli.app import app
from services.cli.embed import cosine
from services.cli.problem import Problem, Usage
from tests.unit.cli.gateway import Gateway


def _run(*arguments: str, text: str | None = None) -> str:
    result = CliRunner().invoke(app, list(arguments), input=text, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_people_see_how_vectors_begin_and_how_near_they_are_to_the_first(gateway: Gateway) -> None:
    assert _run("embed", "a cat", "a dog", "b").splitlines() == [
        "1.000  [+3.0000 +4.0000 +0.0000 +0.0000 ...]  5  a cat",
        "1.000  [+3.0000 +4.0000 +0.0000 +0.0000 ...]  5  a dog",
        "0.800  [+0.0000 +5.0000 +0.0000 +0.0000 ...]  5  b",
    ]
    (request,) = gateway.embedded
    assert [entry.text for entry in request.inputs] == ["a cat", "a dog", "b"]
    assert (request.model, request.HasField("dimensions")) == ("", False)


def test_programs_get_whole_vectors_a_line_each(gateway: Gateway) -> None:
    lines = _run("embed", "--json", "-m", "vectors", "--dimensions", "2", "b", "é a").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"index": 0, "text": "b", "embedding": [0.0, 5.0]},
        {"index": 1, "text": "é a", "embedding": [3.0, 4.0]},
    ]
    assert (gateway.embedded[0].model, gateway.embedded[0].dimensions) == ("vectors", 2)


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_lines_of_standard_input_are_texts(gateway: Gateway, arguments: tuple[str, ...]) -> None:
    assert len(_run("embed", *arguments, text="a\n\n  \nb\n").splitlines()) == 2
    with pytest.raises(Usage, match="there is no text"):
        _run("embed", *arguments, text="\n")


def test_a_refusal_is_one_line(gateway: Gateway) -> None:
    with pytest.raises(Problem, match=r"INVALID_ARGUMENT: inputs\[0\] has 300 tokens"):
        _run("embed", "refuse")


def test_the_cosine_of_no_length_is_none() -> None:
    assert cosine([0.0, 0.0], [1.0, 0.0]) == 0.0
    assert cosine([1.0, 0.0], [2.0, 0.0]) == 1.0
