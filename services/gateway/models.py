"""The models that this gateway names: tokenizer and template from their files, and what the fleet says of them now."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from forebay.v1 import admin_pb2
from services.gateway.text.template import ChatTemplate
from services.gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """One model as it is now. A request keeps the one it was admitted with."""

    name: str
    aliases: tuple[str, ...]
    tokenizer: Tokenizer
    template: ChatTemplate | None
    context_len: int  # tokens, by its own files
    vocab_size: int
    created: int  # seconds since the epoch at which the gateway took it up
    level: str = "fp32"
    version: str = ""  # empty: no worker has shown it yet
    max_model_len: int = 0  # tokens; the fleet's longest, or context_len
    fingerprint: str = ""
    ready: bool = False

    @property
    def full_name(self) -> str:
        """As tickets and workers call it: name@level."""
        return f"{self.name}@{self.level}"


class Catalogue:
    """Models by name and alias."""

    @classmethod
    def from_entries(cls, entries: str) -> Self:
        """`entries` is FOREBAY_MODELS: PATH=NAME[|ALIAS...], separated by commas. ModelError says what is wrong with which."""
        raise NotImplementedError

    def resolve(self, name: str) -> ServedModel:
        """The model of a name or alias, or the only one for an empty name. Raises StatusError NOT_FOUND."""
        raise NotImplementedError

    def list(self) -> Sequence[ServedModel]:
        """All of them, by name."""
        raise NotImplementedError

    def update_fleet(self, fleet: admin_pb2.GetFleetResponse) -> None:
        """Takes over what live workers say: version, level, length, fingerprint, readiness."""
        raise NotImplementedError


def load_model(path: Path, name: str, aliases: Sequence[str] = ()) -> ServedModel:
    """Tokenizer, template and shape of a GGUF file or a Hugging Face folder."""
    raise NotImplementedError
