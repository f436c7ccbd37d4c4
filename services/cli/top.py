"""`forebay top`: workers, requests by class and the queue on one screen, looked at again and again."""

import io
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from forebay.v1 import admin_pb2, types_pb2
from services.cli import places
from services.cli.fleet import ask_fleet, queue_columns, worker_columns
from services.cli.output import as_dict, class_word, print_json
from services.cli.problem import Problem
from services.cli.ps import is_current
from services.cli.table import Column, print_table

Every = Annotated[float, typer.Option("--every", metavar="SECONDS", min=0.2, max=60, help="How often it looks.")]
Json = Annotated[bool, typer.Option("--json", help="One look as a JSON object.")]
Classes = dict[types_pb2.LatencyClass.ValueType, int]


def top(every: Every = 1.0, as_json: Json = False) -> None:
    """Shows workers, requests by class and the queue until Ctrl-C; one look where the output is no terminal."""
    fleet, console = ask_fleet(), Console()
    if as_json:
        running = {class_word(latency_class): number for latency_class, number in running_by_class(fleet).items()}
        print_json({**as_dict(fleet), "running": running})
    elif not console.is_terminal:
        print(picture(fleet), end="")
    else:
        _watch(fleet, console, every)


def _watch(fleet: admin_pb2.GetFleetResponse, console: Console, every: float) -> None:
    trouble = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(Text.from_ansi(f"{picture(fleet, console.width)}\n{trouble or 'Ctrl-C leaves'}"), refresh=True)
                time.sleep(every)
                try:
                    fleet, trouble = ask_fleet(), ""
                except Problem as problem:  # what was seen last stays, with why there is no news
                    trouble = str(problem)
        except KeyboardInterrupt:
            return


def picture(fleet: admin_pb2.GetFleetResponse, width: int | None = None) -> str:
    """All of it; for a terminal of this width without the columns that it has no room for."""
    console = Console(file=io.StringIO(), width=width, force_terminal=width is not None)
    if fleet.workers:
        print_table(worker_columns(list(fleet.workers)), console)
    else:
        console.print("no workers")
    if turns := places.columns(fleet.workers):
        console.print()
        print_table(turns, console)
    running = running_by_class(fleet)
    console.print()
    if running:
        classes = Column("class", [class_word(latency_class) for latency_class in running])
        print_table([classes, Column("on workers", [f"{number:,}" for number in running.values()])], console)
    else:
        console.print("nothing runs")
    console.print()
    if fleet.queues:
        print_table(queue_columns(list(fleet.queues)), console)
    else:
        console.print("nobody waits")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def running_by_class(fleet: admin_pb2.GetFleetResponse) -> Classes:
    """Sequences that workers hold, running or waiting there, by class."""
    running: Classes = {}
    for worker in fleet.workers:
        for usage in worker.heartbeat.class_usage if is_current(worker) else ():
            running[usage.latency_class] = running.get(usage.latency_class, 0) + usage.num_slots
    return dict(sorted(running.items()))
