"""The commands by name, and how their errors look."""

import sys

import typer

from services.cli.demo import demo
from services.cli.keys import keys
from services.cli.problem import Problem
from services.cli.ps import models, ps
from services.cli.run import run
from services.cli.up import up

app = typer.Typer(
    name="forebay",
    help="An LLM inference mesh: gateway, scheduler and workers over gRPC.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (up, run, ps, models, keys, demo):
    app.command()(command)


def run_app() -> int:
    """Runs the command line; returns the exit code where no SystemExit carries one."""
    try:
        app()
    except Problem as problem:
        for line in problem.details:
            print(f"  {line}", file=sys.stderr)
        print(f"forebay: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `forebay ps | head`
        return 0
    return 0
