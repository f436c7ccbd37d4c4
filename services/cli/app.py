"""The commands by name, and how their errors look."""

import importlib.metadata
import io
import os
import sys
from typing import Annotated

import typer

from services.cli import api_keys, batch, orgs, policy, residents
from services.cli.certs import certs
from services.cli.demo import demo
from services.cli.drain import drain, undrain
from services.cli.embed import embed
from services.cli.explain import explain
from services.cli.fleet import queue, workers
from services.cli.problem import Problem, Usage
from services.cli.ps import ps
from services.cli.run import run
from services.cli.top import top
from services.cli.up import up
from services.cli.usage import audit, usage

app = typer.Typer(name="forebay", pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)
for command in (up, run, embed, ps, queue, workers, drain, undrain, top, explain, usage, audit, certs, demo):
    app.command()(command)
for group in (batch.app, api_keys.app, orgs.app, policy.app, residents.app):
    app.add_typer(group)


@app.callback(invoke_without_command=True)
def forebay(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """An LLM inference mesh: gateway, scheduler and workers over gRPC."""
    if version:
        print(f"forebay {importlib.metadata.version('forebay')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def run_app() -> int:
    """Runs the command line; returns the exit code where no SystemExit carries one."""
    _take_any_text()
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()  # here, where a full disk can still be told of
    except typer.TyperException as error:
        return _tell(Usage(f"{error.format_message().rstrip('.')}: see `forebay --help` or `forebay COMMAND --help`"))
    except Problem as problem:
        return _tell(problem)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `forebay ps | head`
        _drop_output()
        return 1
    except OSError as error:
        _drop_output()
        where = f"{error.filename}: " if error.filename else ""
        return _tell(Problem(f"{where}{error.strerror or error}"))
    return code if isinstance(code, int) else 0


def _take_any_text() -> None:
    """What the terminal's encoding lacks is shown as question marks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _drop_output() -> None:
    """Nobody takes it: what is still buffered must not fail once more at the interpreter's exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(problem: Problem) -> int:
    for line in problem.details:
        print(f"  {line}", file=sys.stderr)
    print(f"forebay: {problem}", file=sys.stderr)
    return problem.exit_code
