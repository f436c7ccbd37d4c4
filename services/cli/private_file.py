"""Files that are the person's own, written whole or not at all."""

import os
from pathlib import Path


def write(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Puts a file in its place, with that mode from its first byte on."""
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    draft.replace(path)
