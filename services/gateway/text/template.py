"""A model's chat template: a conversation in, its prompt out, by the conventions of Hugging Face. What a template may do is sandbox's."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from services.common import log
from services.common.errors import StatusError, invalid
from services.gateway.text import sandbox
from services.gateway.text.tool_format import as_plain_messages, format_of, knows_tools
from services.gateway.tools import Tool
from services.text.gguf_metadata import ModelError
from services.text.tokenizer import SpecialTokens

_log = log.get(__name__)

MAX_SOURCE_CHARS = 256 << 10


class ChatTemplate:
    """Renders conversations as the model was trained on them."""

    def __init__(self, source: str, special: SpecialTokens) -> None:
        """Raises ModelError where the source is no template."""
        if len(source) > MAX_SOURCE_CHARS:
            raise ModelError(f"its chat template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are read")
        try:
            self._template = sandbox.ENVIRONMENT.from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise ModelError(f"its chat template can't be read: {_one_line(error)}") from None
        names = {"bos_token": special.bos, "eos_token": special.eos, "unk_token": special.unk, "pad_token": special.pad}
        self._special = {name: token for name, token in names.items() if token}
        self._knows_tools = knows_tools(source)
        self.tool_format = format_of(source)
        """How its model calls tools; None: in a form that isn't known here."""
        self.can_think = "<think>" in source
        """Replies may begin with a thought."""
        self.has_thinking_switch = re.search(r"\benable_thinking\b", source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        name: str = "messages",
    ) -> str:
        """The prompt of a conversation, to be encoded without further special tokens. enable_thinking None: as the template has it.

        Raises INVALID_ARGUMENT that blames `name`, with the template's own words where it refuses the conversation.
        """
        shown = [dict(message) for message in messages] if self._knows_tools else as_plain_messages(messages, tools)
        switch = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            with sandbox.bounded():
                return self._template.render(
                    messages=shown,
                    add_generation_prompt=add_generation_prompt,
                    tools=[tool.described() for tool in tools] or None,
                    documents=None,
                    **switch,
                    **self._special,
                )
        except sandbox.TemplateRefusal as error:
            raise invalid(name, f"the model's chat template refuses the conversation: {_one_line(error)}") from None
        except sandbox.TemplateLimit as error:
            raise self._failed(name, str(error)) from None
        except RecursionError:
            raise self._failed(name, "nests too deeply") from None
        except Exception as error:  # whatever a template's code can raise is about this template and conversation
            raise self._failed(name, f"fails: {_one_line(error)}") from None

    @staticmethod
    def _failed(name: str, why: str) -> StatusError:
        _log.warning("chat_template_failed", why=why)
        return invalid(name, f"the model's chat template can't render this conversation: it {why}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
