"""A conversation on its way to a prompt: which tools are shown, whether the model thinks, what form the reply must have.

What generates and what only counts come this way alike. Places nothing and samples nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.common.errors import invalid
from services.gateway.aside import aside
from services.gateway.field import Field, shown
from services.gateway.grammar_field import check_grammar
from services.gateway.models import ServedModel
from services.gateway.prompts import num_bytes_of, validate_messages
from services.gateway.text.reply import ReplyForm
from services.gateway.text.template import ChatTemplate
from services.gateway.text.tool_format import tool_grammar
from services.gateway.tools import ToolUse, validate_tools
from services.text.grammar import Grammar


@dataclass(frozen=True)
class ChatOptions:
    """What a chat says beside its messages and sampling, unchecked: as OpenAI has it."""

    tools: object = None
    tool_choice: object = None
    parallel_tool_calls: object = None
    enable_thinking: object = None


@dataclass(frozen=True)
class Chat:
    """What the options come to with one model."""

    model: ServedModel
    template: ChatTemplate
    use: ToolUse | None  # None: no tool is shown
    grammar: Grammar | None  # of the whole reply, calls included; None: free text
    enable_thinking: bool | None  # None: as the template has it

    async def render(self, messages: object, name: str) -> tuple[str, list[int]]:
        """The prompt of unchecked messages, as text and as ids. Raises INVALID_ARGUMENT that blames `name`."""
        conversation = validate_messages(messages, name=name)
        tools = () if self.use is None else self.use.tools

        def rendered() -> tuple[str, list[int]]:
            text = self.template.render(conversation, tools=tools, enable_thinking=self.enable_thinking, name=name)
            # The template has put the special tokens in.
            return text, self.model.tokenizer.encode(text, add_special=False)

        return await aside(rendered, sum(map(num_bytes_of, conversation)) + sum(len(tool.description) for tool in tools))

    def reply_form(self, prompt: str) -> ReplyForm:
        """What to look for in the reply to a rendered prompt."""
        tool_format = None if self.use is None else self.template.tool_format
        thinks = self.template.can_think
        return ReplyForm(tool_format, thinks=thinks, begins_thinking=thinks and prompt.rstrip().endswith("<think>"))


def check_chat(model: ServedModel, options: ChatOptions, grammar: object, names: Mapping[str, str]) -> Chat:
    """Options and a grammar, both unchecked. `names` maps our field names to the client's. Raises INVALID_ARGUMENT."""
    if model.template is None:
        raise invalid("model", f"{model.name} has no chat template: send a prompt to the completions endpoint instead")
    name = names.get("grammar", "grammar")
    use = validate_tools(options.tools, options.tool_choice, options.parallel_tool_calls, names)
    answer = None if grammar is None else check_grammar(Field(name, grammar))
    forced = "tool_choice" if use is not None and use.required else name if answer is not None else None
    thinking = _thinking(model.name, model.template, options.enable_thinking, forced)
    reply = answer if use is None else _with_calls(model.name, model.template, use, answer, name)
    return Chat(model, model.template, use, reply, thinking)


def _with_calls(model: str, template: ChatTemplate, use: ToolUse, answer: Grammar | None, name: str) -> Grammar:
    """Calls, or an answer of the form that `name` asks for. Where a call is required there is no answer that could have another."""
    if template.tool_format is None:
        raise invalid("tools", f"{model} writes calls of tools in a form that isn't known here: leave tools out")
    if answer is not None and not use.required:
        if not template.tool_format.tag:
            raise invalid(name, f"{name} can't go with tools: {model} writes a call as bare JSON, for which an answer could be taken")
        if answer.rule is None:
            raise invalid(name, f"{name} is a grammar in Lark, with rules of its own: it can't go with tools; send one of the other kinds")
    return tool_grammar(template.tool_format, use, answer)


def _thinking(model: str, template: ChatTemplate, wanted: object, forced: str | None) -> bool | None:
    """The template's switch. What forces the reply's form (`forced`, a field) leaves no room for a thought."""
    name = "enable_thinking"
    if wanted is None:
        return False if forced is not None and template.has_thinking_switch else None
    if not isinstance(wanted, bool):
        raise invalid(name, f"{name} is {shown(wanted)}: it must be true or false")
    if not template.has_thinking_switch:
        raise invalid(name, f"{name} is given, and the chat template of {model} has no such switch: leave it out")
    if wanted and forced is not None:
        raise invalid(name, f"{name} is true: it can't go with {forced}, which leaves no room for a thought")
    return wanted
