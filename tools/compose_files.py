"""What compose.yaml mounts, made where it isn't there yet: keys and a token, passwords, certificates; and .env with the default models.

Usage: python tools/compose_files.py [FOLDER], the folder of compose.yaml.
"""

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from services.cli import authority, keys, models

_NUM_WORKERS = 2
_PASSWORDS = ("valkey_password", "grafana_password")


def make(folder: Path) -> None:
    """The files in `folder`; those that are there stay as they are. Problem where the default model isn't installed."""
    secret_folder = folder / "secrets"
    keys.ensure(secret_folder)
    authority.ensure(secret_folder)
    for name in _PASSWORDS:
        password = secret_folder / name
        if not password.exists():
            password.write_text(secrets.token_hex(32) + "\n")
    # Containers read them under a user id of their own; on this machine the folder keeps others out.
    for path in [secret_folder / name for name in (*_PASSWORDS, "token")] + [
        authority.key(secret_folder, role) for role in authority.ROLES
    ]:
        path.chmod(0o644)
    environment = folder / ".env"
    if not environment.exists():
        environment.write_text(_environment(models.defaults(), max(1, len(os.sched_getaffinity(0)) // _NUM_WORKERS)))


def _environment(served: Sequence[models.ModelFiles], cpus: int) -> str:
    """Compose reads these where its own environment doesn't name others. `served`: one that generates, and maybe one that embeds."""
    model, *others = served
    names = {
        "FOREBAY_MODEL_DIR": model.path.parent,
        "FOREBAY_MODEL_FILE": model.path.name,
        "FOREBAY_MODEL_NAME": model.name,
        "FOREBAY_WORKER_CPUS": cpus,
    }
    for embedding in others:
        names |= {"FOREBAY_EMBEDDING_DIR": embedding.path, "FOREBAY_EMBEDDING_NAME": embedding.name}
    return "".join(f"{name}={value}\n" for name, value in names.items())


if __name__ == "__main__":
    make(Path(sys.argv[1] if len(sys.argv) > 1 else "deploy"))
