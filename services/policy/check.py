"""All that is wrong with a policy file, for the person who writes it. A service stops at the first."""

from pathlib import Path

from services.policy import document
from services.policy.document import Node, PolicyError, Scalar, Sequence
from services.policy.policy import load, read

MAX_PROBLEMS = 100


def problems(path: Path) -> list[PolicyError]:
    """The problems, in the order in which they are met; none of a file that can be used. OSError where it can't be read.

    What is wrong is taken out and the rest read again, as long as it is a single value: of the loss of more, others would be blamed.
    """
    try:
        load(path)
    except PolicyError as error:
        first = error
    else:
        return []
    try:
        root = document.compose(path.read_text())
    except (PolicyError, UnicodeDecodeError):
        return [first]
    found: dict[str, PolicyError] = {}
    while len(found) < MAX_PROBLEMS:
        try:
            read(root)
        except PolicyError as error:
            told = PolicyError(error.line, error.message, str(path))
            found.setdefault(str(told), told)
            if _take_out(root, error.line):
                continue
        break
    return list(found.values())


def _take_out(node: Node, line: int) -> bool:
    """Takes the first single value in that line out. Whether there was one."""
    if isinstance(node, Scalar):
        return False
    if isinstance(node, Sequence):
        for item in node.items:
            if isinstance(item, Scalar) and item.line == line:
                node.items.remove(item)
                return True
        return any(_take_out(item, line) for item in node.items)
    for key, (key_line, value) in node.entries.items():
        if isinstance(value, Scalar) and line in (key_line, value.line):
            del node.entries[key]
            return True
    return any(_take_out(value, line) for _, value in node.entries.values())
