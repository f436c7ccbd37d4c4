"""YAML text -> nodes that know their lines. Plain data only: no tag, no alias, bounded in size and depth. Knows no section of a policy."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

MAX_BYTES = 1 << 20
MAX_DEPTH = 12
MAX_NODES = 100_000
_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class PolicyError(ValueError):
    """A policy that can't be used: one line for the person who wrote it, with the line where it is wrong."""

    def __init__(self, line: int, message: str, file: str = "") -> None:
        super().__init__(f"{file}:{line}: {message}" if file else f"line {line}: {message}")
        self.line = line
        self.message = message


@dataclass
class Scalar:
    """A text as it stands there; what it means is for its reader to say, so that `no` may be an org. Lines count from 1."""

    line: int
    text: str
    plain: bool = True
    """Without quotes: an empty or `null` plain text is nothing."""

    @property
    def is_nothing(self) -> bool:
        """Whether a key has no value."""
        return self.plain and self.text in ("", "~", "null")


@dataclass
class Sequence:
    """A list."""

    line: int
    items: list["Node"] = field(default_factory=list)


@dataclass
class Mapping:
    """Keys with their own lines and their values, as they come."""

    line: int
    entries: dict[str, tuple[int, "Node"]] = field(default_factory=dict)


Node = Scalar | Sequence | Mapping


def compose(text: str) -> Node:
    """The one document of a text. PolicyError where it isn't plain YAML, is too large, or says a key twice."""
    num_bytes = len(text.encode())
    if num_bytes > MAX_BYTES:
        raise PolicyError(1, f"the file has {num_bytes} bytes; it may have at most {MAX_BYTES}")
    try:
        events = _bounded(yaml.parse(text, Loader=_LOADER))
        next(events)  # the stream's start
        if isinstance(next(events), yaml.StreamEndEvent):
            return Mapping(1)  # An empty file promises nothing.
        document = _node(next(events), events)
        next(events)  # the document's end
        last = next(events)
        if not isinstance(last, yaml.StreamEndEvent):
            raise PolicyError(_line(last), "a second document begins here; a policy is one")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise PolicyError(mark.line + 1 if mark else 1, f"it isn't YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:  # characters that YAML doesn't allow
        raise PolicyError(1, f"it isn't YAML: {str(error).splitlines()[0]}") from None
    return document


def _bounded(events: Iterator[yaml.Event]) -> Iterator[yaml.Event]:
    """The events, refusing what plain data doesn't have before more of it is read."""
    depth = nodes = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise PolicyError(_line(event), "anchors and aliases (& and *) are not taken here: put a text that begins with * into quotes")
        tagged = getattr(event, "tag", None) if isinstance(event, yaml.NodeEvent) else None
        if tagged not in (None, "!"):
            raise PolicyError(_line(event), f"tags ({tagged}) are not taken here")
        nodes += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise PolicyError(_line(event), f"it is nested more than {MAX_DEPTH} levels deep")
        if nodes > MAX_NODES:
            raise PolicyError(_line(event), f"it has more than {MAX_NODES} values")
        yield event


def _node(event: yaml.Event, events: Iterator[yaml.Event]) -> Node:
    line = _line(event)
    if isinstance(event, yaml.ScalarEvent):
        return Scalar(line, event.value, plain=event.style in (None, ""))
    if isinstance(event, yaml.SequenceStartEvent):
        sequence = Sequence(line)
        while not isinstance(inner := next(events), yaml.SequenceEndEvent):
            sequence.items.append(_node(inner, events))
        return sequence
    mapping = Mapping(line)
    while not isinstance(key := next(events), yaml.MappingEndEvent):
        if not isinstance(key, yaml.ScalarEvent):
            raise PolicyError(_line(key), "a key must be a text")
        if key.value in mapping.entries:
            raise PolicyError(
                _line(key), f"{key.value!r} is here for the second time; the first is in line {mapping.entries[key.value][0]}"
            )
        mapping.entries[key.value] = (_line(key), _node(next(events), events))
    return mapping


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None, "the parser gives every event its place"
    return int(event.start_mark.line) + 1
