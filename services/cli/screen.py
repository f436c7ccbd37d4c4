"""What `forebay up` shows: a list of steps with progress bars, then the box with what to paste. Or JSON lines for programs."""

import json
import sys
from collections.abc import Callable

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from services.cli.home import Running
from services.cli.supervisor import Event

_ORDER = {"valkey": "Valkey", "keys": "keys and token", "scheduler": "scheduler", "gateway": "gateway", "models": "models answer"}


class StepList:
    """Steps on a terminal; on anything else one line per finished step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/green]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._steps: dict[str, TaskID] = {}
        self._starting = True

    def __enter__(self) -> "StepList":
        if self._live:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._starting = False
        if self._live:
            self._progress.stop()

    def hear(self, event: Event) -> None:
        """Takes news of a child or a step."""
        if event.kind in ("died", "restarting") or not self._starting:
            self._report(event)
        elif event.kind == "starting":
            self._steps[event.child] = self._progress.add_task(_ORDER.get(event.child, event.child), total=None, note="")
        elif event.kind == "loading":
            self._load(event)
        elif event.kind == "listening":
            self._finish(event)

    def _load(self, event: Event) -> None:
        done, total = event.facts.get("done"), event.facts.get("total")
        if isinstance(done, int) and isinstance(total, int) and event.child in self._steps:
            note = f"{done / 1e6:.0f}/{total / 1e6:.0f} MB"
            self._progress.update(self._steps[event.child], completed=done, total=total, note=note)

    def _finish(self, event: Event) -> None:
        step = self._steps.get(event.child)
        if step is None:
            return
        total = self._progress.tasks[step].total or 1
        self._progress.update(step, total=total, completed=total)
        if not self._live:
            self._console.print(f"✓ {_ORDER.get(event.child, event.child)}", highlight=False)

    def _report(self, event: Event) -> None:
        facts = event.facts
        if event.kind == "died":
            self._console.print(
                f"[red]{event.child} {facts['how']}[/red]; it starts again in {facts['backoff_seconds']:g} s. Its log: {facts['log']}",
                highlight=False,
                soft_wrap=True,
            )
        elif event.kind == "listening":
            self._console.print(f"[green]{event.child} is back[/green]", highlight=False)
        elif event.kind == "stopped":
            self._console.print(f"[dim]{_ORDER.get(event.child, event.child)} stopped[/dim]", highlight=False)


def json_listener() -> Callable[[Event], None]:
    """One JSON line per event on standard output."""

    def hear(event: Event) -> None:
        print(json.dumps({"event": event.kind, "child": event.child, **event.facts}), flush=True)

    return hear


def print_box(console: Console, running: Running) -> None:
    """The addresses and the token, then lines that work when pasted (never wrapped)."""
    metrics = ", ".join(f"{address} ({name})" for name, address in running.internal_addresses.items())
    facts = Table.grid(padding=(0, 2))
    for name, value in (
        ("gRPC", running.grpc_address), ("HTTP", running.http_base_url), ("models", ", ".join(running.models)), ("metrics", metrics)
    ):  # fmt: skip
        facts.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    console.print(Panel(facts, title="Forebay is up", border_style="green", expand=False))
    for title, line in (("token", running.token), ("curl", curl_line(running)), ("Python", python_line(running))):
        console.print(f"[bold]{title}[/bold]")
        # Written plainly: a wrapped or coloured line doesn't paste.
        print(line, file=sys.stdout, flush=True)
    console.print("[dim]`forebay run` chats, `forebay ps` shows the workers, Ctrl-C stops.[/dim]")


def curl_line(running: Running) -> str:
    """A chat completion by curl, ready to paste."""
    messages = [{"role": "user", "content": "Name the capital of France."}]
    body = {"model": running.models[0], "messages": messages, "max_tokens": 32, "temperature": 0}
    return (
        f"curl -sS {running.http_base_url}/chat/completions -H 'Authorization: Bearer {running.token}' "
        f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )


def python_line(running: Running) -> str:
    """The same by the openai package, as a shell line."""
    code = (
        f"from openai import OpenAI; c = OpenAI(base_url='{running.http_base_url}', api_key='{running.token}'); "
        f"print(c.chat.completions.create(model='{running.models[0]}', max_tokens=32, temperature=0, "
        "messages=[dict(role='user', content='Name the capital of France.')]).choices[0].message.content)"
    )
    return f'{sys.executable} -c "{code}"'
