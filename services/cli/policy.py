"""`forebay policy`: whether a policy file can be used, before a mesh reads it."""

from pathlib import Path
from typing import Annotated

import typer

from services.cli.output import print_json
from services.cli.problem import Problem
from services.policy.check import problems
from services.policy.document import PolicyError
from services.policy.policy import load

app = typer.Typer(name="policy", rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def policies() -> None:
    """Looks at policy files: orgs, tiers, classes and models."""


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A policy file.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Reads FILE as a mesh would, and says what is wrong in which lines."""
    found = problems(file)
    if as_json:
        print_json({"usable": not found, "problems": [{"line": problem.line, "problem": problem.message} for problem in found]})
    elif not found:
        policy = load(file)
        print(f"{file} can be used: {len(policy.tiers)} tiers, {len(policy.orgs)} orgs, {len(policy.models)} models")
    else:
        *others, last = map(str, found)
        raise Problem(last, tuple(others))
    if found:
        raise typer.Exit(1)


def require_usable(file: Path) -> None:
    """Problem, which names the line, where a mesh couldn't use the file."""
    try:
        load(file)
    except PolicyError as error:
        raise Problem(f"{error}; `forebay policy check` shows all that is wrong") from None
