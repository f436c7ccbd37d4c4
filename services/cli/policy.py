"""`forebay policy`: whether a policy file can be used, before a mesh reads it."""

from pathlib import Path
from typing import Annotated

import typer

from services.cli.output import print_json
from services.cli.problem import Problem
from services.policy.document import PolicyError
from services.policy.policy import load

app = typer.Typer(name="policy", rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def policy() -> None:
    """Looks at policy files: orgs, tiers, classes and models."""


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A policy file.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Reads FILE as a mesh would, and says what is wrong in which line."""
    try:
        found = load(file)
    except PolicyError as error:
        if not as_json:
            raise Problem(str(error)) from None
        print_json({"usable": False, "line": error.line, "problem": error.message})
        raise typer.Exit(1) from None
    sizes: dict[str, object] = {part: len(getattr(found, part)) for part in ("tiers", "orgs", "models")}
    if as_json:
        print_json({"usable": True, **sizes})
    else:
        print(f"{file} can be used: " + ", ".join(f"{size} {part}" for part, size in sizes.items()))


def require_usable(file: Path) -> None:
    """Problem, which names the line, where a mesh couldn't use the file."""
    try:
        load(file)
    except PolicyError as error:
        raise Problem(str(error)) from None
