"""A chat model's text as it comes, taken apart: what it thinks, what it says, and which tools it calls.

Pure: text in, parts out, whatever the pieces. What looks like a call and isn't one is said as text; nothing is lost.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from services.gateway.text.tool_format import ToolFormat

_THINK, _END_THINK = "<think>", "</think>"
_MAX_HEAD_CHARS = 256  # of a call before its arguments


@dataclass(frozen=True)
class CallPart:
    """A piece of a call. `name` comes first and once, then the arguments' JSON in pieces."""

    index: int
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class Part:
    """One piece of a reply: of one kind."""

    content: str = ""
    reasoning: str = ""
    call: CallPart | None = None


@dataclass(frozen=True)
class ReplyForm:
    """What to look for."""

    tools: ToolFormat | None = None
    thinks: bool = False  # may begin with <think>
    begins_thinking: bool = False  # the prompt ended in <think>


PLAIN = ReplyForm()
"""All of it is text."""


class Reply:
    """One choice's reply. `push` text as it comes, then `finish` once."""

    def __init__(self, form: ReplyForm) -> None:
        self._form = form
        self._held = ""
        self._step = self._thought if form.begins_thinking else self._opening if form.thinks else self._beginning
        self._final = False
        self._thinking_begun = False
        self._scan = _ObjectScan()
        self.num_calls = 0  # that are whole

    def push(self, text: str) -> list[Part]:
        """The parts that are sure with this text."""
        self._held += text
        return list(self._parts())

    def finish(self) -> list[Part]:
        """What was held back."""
        self._final = True
        return list(self._parts())

    def _parts(self) -> Iterator[Part]:
        """Steps until nothing is held, or what is held needs more text. A step answers whether it got on."""
        while self._held:
            before, step = self._held, self._step
            yield from self._step()
            if self._held == before and self._step == step:
                return

    # -- steps: each takes what it can off the front of `_held`, and sets the next

    def _opening(self) -> Iterator[Part]:
        """At the very front: is it a thought?"""
        text = self._held.lstrip()
        if text.startswith(_THINK):
            self._held = text.removeprefix(_THINK)
            self._step = self._thought
        elif not _THINK.startswith(text) or self._final:
            self._step = self._beginning
        yield from ()

    def _thought(self) -> Iterator[Part]:
        """Up to </think>; line breaks around a thought aren't part of it."""
        thought, found, rest = self._held.partition(_END_THINK)
        if found:
            self._held, self._step = rest, self._behind_thought
        elif self._final:
            self._held = ""
        else:
            keep = len(thought) - _sure_length(thought, _END_THINK)
            body = thought[: len(thought) - keep].rstrip("\n")
            thought, self._held = body, thought[len(body) :]
        thought = thought.rstrip("\n") if found or self._final else thought
        if not self._thinking_begun:
            stripped = thought.lstrip("\n")
            self._thinking_begun = bool(stripped)
            thought = stripped
        if thought:
            yield Part(reasoning=thought)

    def _behind_thought(self) -> Iterator[Part]:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._step = self._beginning
        yield from ()

    def _beginning(self) -> Iterator[Part]:
        tools = self._form.tools
        calls = tools is not None and not tools.tag and self._held.startswith("{")
        self._step = self._head if calls else self._said
        yield from ()

    def _said(self) -> Iterator[Part]:
        """Text, up to the tag of a call."""
        tools = self._form.tools
        if tools is None or not tools.tag:
            text, self._held = self._held, ""
        else:
            text, found, rest = self._held.partition(tools.tag)
            if found:
                self._held, self._step = rest, self._head
            else:
                cut = len(text) if self._final else _sure_length(text, tools.tag)
                text, self._held = text[:cut], text[cut:]
        if text:
            yield Part(content=text)

    def _head(self) -> Iterator[Part]:
        """The call's name, up to the brace of its arguments."""
        tools = self._tools
        head = re.match(rf'\s*\{{\s*"name"\s*:\s*"([\w-]+)"\s*,\s*"{tools.arguments}"\s*:\s*(?=\{{)', self._held)
        if head is not None:
            self._held = self._held[head.end() :]
            self._scan, self._step = _ObjectScan(), self._arguments
            yield Part(call=CallPart(self.num_calls, name=head[1]))
        elif self._final or len(self._held) > _MAX_HEAD_CHARS:
            yield Part(content=tools.tag)
            self._step = self._said

    def _arguments(self) -> Iterator[Part]:
        length = self._scan.push(self._held)
        piece, self._held = self._held[:length], self._held[length:]
        if self._scan.whole:
            self._step = self._tail
        yield Part(call=CallPart(self.num_calls, arguments=piece))

    def _tail(self) -> Iterator[Part]:
        """The call's own end, and what stands between two."""
        tools = self._tools
        tail = re.match(rf"\s*\}}{re.escape(tools.end)}", self._held)
        if tail is not None:
            self.num_calls += 1
            self._held, self._step = self._held[tail.end() :], self._behind_call
        elif not f"}}{tools.end}".startswith(text := self._held.lstrip()):
            self._step = self._said
        elif self._final and text:  # cut off within it
            self._held = ""
        yield from ()

    def _behind_call(self) -> Iterator[Part]:
        """Another call, or the end."""
        tools, text = self._tools, self._held.lstrip(" \n;")
        lead = tools.tag or "{"
        if text.startswith(lead):
            self._held, self._step = text.removeprefix(tools.tag), self._head
        elif text and not lead.startswith(text):
            self._step = self._said
        elif self._final:
            self._held = ""
        yield from ()

    @property
    def _tools(self) -> ToolFormat:
        assert self._form.tools is not None, "a call in a reply without tools"
        return self._form.tools


class _ObjectScan:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.whole = False

    def push(self, text: str) -> int:
        """How many characters of `text` belong to the object."""
        for index, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.whole = True
                    return index + 1
        return len(text)


def _sure_length(text: str, tag: str) -> int:
    """Characters of `text` that can't be the beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return len(text) - length
    return len(text)
