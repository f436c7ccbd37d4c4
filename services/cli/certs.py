"""`forebay certs`: the files of a mesh's mutual TLS, and what to set for each service."""

from pathlib import Path
from typing import Annotated

import typer

from services.cli import authority
from services.cli.options import whole


def certs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where they are written; made where there is none.")],
    days: Annotated[int, typer.Option("--days", parser=whole("--days", 1, 3650), metavar="N", help="How long the roles' are good.")] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="New certificates for the roles, by the CA that is there.")] = False,
    force: Annotated[bool, typer.Option("--force", help="All anew, the CA too: old and new ones don't take each other.")] = False,
) -> None:
    """Makes a CA and a certificate per role, for mutual TLS between gateway, scheduler and workers.

    Give each service its own three files; running ones read them again when they change. Keep ca.key to yourself: it makes others.
    """
    authority.make(folder, days, renew=renew, force=force)
    for role in authority.ROLES:
        print(f"# {role}")
        for variable, path in authority.environment(folder, role).items():
            print(f"{variable}={path}")
