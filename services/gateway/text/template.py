"""A model's chat template."""

from collections.abc import Mapping, Sequence


class ChatTemplate:
    """Renders conversations."""

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The prompt. Raises StatusError INVALID_ARGUMENT with the template's own words where it refuses the conversation."""
        raise NotImplementedError
