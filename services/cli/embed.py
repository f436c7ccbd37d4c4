"""`forebay embed`: vectors of texts, over gRPC."""

import asyncio
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from forebay.v1 import inference_pb2, inference_pb2_grpc
from services.cli import client
from services.cli.options import text, utf8, whole
from services.cli.problem import Usage

_SHOWN = 4  # numbers of a vector, to people


def embed(
    texts: Annotated[list[str] | None, typer.Argument(parser=text("a text"), metavar="TEXT...")] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", parser=text("--model"), metavar="NAME", help="One that embeds; may be left out where there is one such."
        ),
    ] = "",
    dimensions: Annotated[
        int | None,
        typer.Option(parser=whole("--dimensions", 1, 1 << 16), metavar="N", help="The first N numbers of each vector alone."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object per text, with the whole vector.")] = False,
) -> None:
    """Turns texts into vectors.

    Without TEXT, or with '-', every line of standard input is one. People see how a vector begins, and how near its text is to the first
    one: the cosine, 1 for the same meaning.
    """
    given = _lines() if texts in (None, [], ["-"]) else texts or []
    if not given:
        raise Usage("there is no text: say what to embed")
    request = inference_pb2.EmbedRequest(model=model, inputs=[inference_pb2.EmbedInput(text=one) for one in given], dimensions=dimensions)
    target = client.find()
    with client.friendly_errors(target):
        vectors = asyncio.run(_vectors(target, request))
    for index, one in enumerate(given):
        if as_json:
            print(json.dumps({"index": index, "text": one, "embedding": vectors[index]}, ensure_ascii=False))
        else:
            print(_line(one, vectors[index], vectors[0]))


def _lines() -> list[str]:
    try:
        lines = utf8(sys.stdin.read() if sys.stdin is not None else "", "standard input").splitlines()
    except UnicodeDecodeError as error:
        raise Usage(f"standard input isn't {error.encoding.upper()} (at position {error.start}): convert it, with iconv say") from error
    return [line for line in lines if line.strip()]


async def _vectors(target: client.Target, request: inference_pb2.EmbedRequest) -> Mapping[int, Sequence[float]]:
    vectors: dict[int, Sequence[float]] = {}
    async with target.channel() as channel:
        async for event in inference_pb2_grpc.InferenceServiceStub(channel).Embed(request, metadata=target.metadata):
            vectors.update({one.index: list(one.values) for one in event.embeddings.embeddings})
    return vectors


def _line(text_: str, vector: Sequence[float], first: Sequence[float]) -> str:
    beginning = " ".join(f"{value:+.4f}" for value in vector[:_SHOWN])
    rest = " ..." if len(vector) > _SHOWN else ""
    return f"{cosine(first, vector):.3f}  [{beginning}{rest}]  {len(vector)}  {text_}"


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Of the angle between two vectors; 0 where one of them has no length."""
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else 0.0
