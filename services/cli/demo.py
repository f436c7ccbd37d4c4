"""`forebay demo`: a mesh on free ports answers one question over gRPC and one over the OpenAI HTTP API, and stops again."""

import asyncio
import json
import shutil
import tempfile
import time
from pathlib import Path

import httpx
import typer
from rich.console import Console

from forebay.v1 import inference_pb2, types_pb2
from services.cli import models, screen
from services.cli.ask import Answer, Manner, ask
from services.cli.client import Target, friendly_errors
from services.cli.home import Home, Running
from services.cli.mesh import Mesh, Plan
from services.cli.problem import Problem
from services.cli.up import unless, until_signal

_QUESTION = "Name the capital of France."
_EXPECTED = "Paris"
_MAX_TOKENS = 48
_ANSWER_SECONDS = 60


def demo() -> None:
    """Starts a mesh, asks it, and stops it.

    One question over gRPC, one over HTTP; exit code 1 if an answer is wrong.
    """
    plan = Plan((models.default(),), grpc_port=0, http_port=0)
    folder = Path(tempfile.mkdtemp(prefix="forebay-demo-"))
    try:
        wrong = asyncio.run(_demo(plan, Home(folder)))
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)  # not after a failure, whose message names a log in it
    if wrong:
        Console(stderr=True).print(f"[red]no '{_EXPECTED}' in the answer over {' and '.join(wrong)}[/red]")
        raise typer.Exit(1)


async def _demo(plan: Plan, home: Home) -> list[str]:
    """The faces whose answer lacks the expected word."""
    console = Console()
    home.make()
    steps = screen.StepList(console)
    mesh = Mesh(plan, home, steps.hear)
    async with until_signal(mesh) as stopped:
        with steps:
            running = await unless(stopped, mesh.start())
        answers = await unless(stopped, _ask_both(console, running))
        console.print()
    return [face for face, answer in answers.items() if _EXPECTED not in answer.text]


async def _ask_both(console: Console, running: Running) -> dict[str, Answer]:
    answers = {}
    for face, where, ask_face in (("gRPC", running.grpc_address, _ask_grpc), ("HTTP", running.http_base_url, _ask_http)):
        console.print(f"\n[bold]{_QUESTION}[/bold] over {face}, {where}", highlight=False)
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                answer = answers[face] = await ask_face(running)
        except TimeoutError as error:
            raise Problem(f"no whole answer over {face} within {_ANSWER_SECONDS} s") from error
        except httpx.HTTPError as error:
            raise Problem(f"no answer over {face}: {type(error).__name__} {error}".rstrip()) from error
        first, rate = answer.ttft_seconds * 1000, answer.tokens_per_second
        console.print(f"\n[dim]time to first token {first:.0f} ms, {rate:.1f} tokens/s[/dim]", highlight=False)
    return answers


async def _ask_grpc(running: Running) -> Answer:
    sampling = types_pb2.SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)
    request = inference_pb2.ChatRequest(model=running.models[0], sampling=sampling)
    request.messages.add(role="user", content=_QUESTION)
    target = Target(running.grpc_address, running.token)
    with friendly_errors(target):
        await ask(target, request, answer := Answer(), Manner())
    return answer


async def _ask_http(running: Running) -> Answer:
    """Reads the event stream by hand: a demo of the wire, and no need for the openai package."""
    body = {
        "model": running.models[0],
        "messages": [{"role": "user", "content": _QUESTION}],
        "temperature": 0,
        "max_tokens": _MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer, start = Answer(), time.perf_counter()
    client = httpx.AsyncClient(headers={"Authorization": f"Bearer {running.token}"}, timeout=_ANSWER_SECONDS, trust_env=False)
    async with client as http, http.stream("POST", f"{running.http_base_url}/chat/completions", json=body) as response:
        if response.is_error:
            await response.aread()
            raise Problem(f"HTTP {response.status_code}: {response.text}")
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                _take_chunk(answer, json.loads(line.removeprefix("data: ")), start)
    answer.total_seconds = time.perf_counter() - start
    return answer


def _take_chunk(answer: Answer, chunk: dict[str, object], start: float) -> None:
    usage, choices = chunk.get("usage"), chunk.get("choices")
    if isinstance(usage, dict):
        answer.usage = {"completion_tokens": usage["completion_tokens"], "prompt_tokens": usage["prompt_tokens"]}
    for choice in choices if isinstance(choices, list) else ():
        text = choice["delta"].get("content") or ""
        if text and not answer.ttft_seconds:
            answer.ttft_seconds = time.perf_counter() - start
        answer.text += text
        print(text, end="", flush=True)
