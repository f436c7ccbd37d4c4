"""The models that this gateway names: tokenizer and template from their files, and what the fleet says of them now."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from forebay.v1 import admin_pb2, scheduler_pb2
from services.common import log
from services.gateway.text.template import ChatTemplate
from services.text import model_files
from services.text.compiler import Compiler
from services.text.gguf_metadata import ModelError
from services.text.tokenizer import SpecialTokens, Tokenizer

_log = log.get(__name__)

_MAX_NAME_CHARS = 128
Capability = Literal["generate", "embed"]


@dataclass(frozen=True)
class ServedModel:
    """One model as it is now. A request keeps the one that it was admitted with."""

    name: str
    aliases: tuple[str, ...]
    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: it can't chat
    context_len: int  # tokens, by its own files; of one that embeds, longest input
    vocab_size: int
    created: int  # seconds since the epoch at which the gateway took it up
    compiler: Compiler | None  # of grammars; None: it generates nothing
    dimensions: int = 0  # of the vectors that it makes of texts; 0: it generates text
    level: str = ""  # empty: no worker has shown it yet
    version: str = ""  # empty: no worker has shown it yet
    max_model_len: int = 0  # tokens: the longest of any worker; context_len while none is known
    fingerprint: str = ""
    ready: bool = False  # whether a live worker has it loaded
    caches: frozenset[tuple[int, int, int]] = frozenset()  # (blocks, tokens in each, longest sequence in tokens) of its workers

    @property
    def capability(self) -> Capability:
        """What it does."""
        return "embed" if self.dimensions else "generate"

    @property
    def full_name(self) -> str:
        """As tickets and workers call it: name@level."""
        return f"{self.name}@{self.level}"

    def most_held(self, kv_share: float) -> int:
        """Longest sequence in tokens that an org's share of a cache holds, at the worker where that is most; 0 where no share bounds it."""
        if not 0 < kv_share < 1:
            return 0
        # As the scheduler counts it, who would refuse more.
        return max((min(longest, max(1, int(blocks * kv_share)) * size) for blocks, size, longest in self.caches), default=0)


class Models:
    """Models by name and alias, and by name and level."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        """Raises ModelError where two models have one name, or there is none."""
        self._models: dict[str, ServedModel] = {}
        self._names: dict[str, str] = {}  # name or alias -> name
        self._levels: dict[str, ServedModel] = {}  # name@level -> the model at it, where it has been seen
        for model in models:
            for name in dict.fromkeys((model.name, *model.aliases)):
                if name in self._names:
                    raise ModelError(f"two models are called {name!r}: give one another name")
                self._names[name] = model.name
            self._models[model.name] = model
        if not self._models:
            raise ModelError("no model is named: set FOREBAY_MODELS to PATH=NAME[|ALIAS...][,PATH=NAME...]")

    @classmethod
    def from_entries(cls, entries: str) -> Self:
        """`entries` is FOREBAY_MODELS: PATH=NAME[|ALIAS...], separated by commas. ModelError says what is wrong with which."""
        return cls(_load_entry(entry.strip()) for entry in entries.split(",") if entry.strip())

    def get(self, name: str) -> ServedModel | None:
        """The model of a name or alias, as most of its workers have it."""
        return self._models.get(self._names.get(name, ""))

    def at(self, name: str, level: str) -> ServedModel | None:
        """The model of a name or alias at a level that some worker has shown."""
        return self._levels.get(f"{self._names.get(name, '')}@{level}")

    def list(self) -> Sequence[ServedModel]:
        """All of them, by name."""
        return [self._models[name] for name in sorted(self._models)]

    def update_fleet(self, fleet: admin_pb2.GetFleetResponse) -> None:
        """Takes over what live workers say: level, version, length, fingerprint, readiness.

        Where workers differ, most of them decide: requests go to one version, and stay with it while it is among the most.
        """
        shown: dict[str, list[scheduler_pb2.WorkerModel]] = {name: [] for name in self._models}
        for worker in fleet.workers:
            for served in worker.registration.models if worker.ready else ():
                name = served.model.rpartition("@")[0]
                if served.loaded and name in shown:
                    shown[name].append(served)
        for name, candidates in shown.items():
            self._models[name] = _as_shown(self._models[name], candidates)
            for full_name in {served.model for served in candidates}:
                self._levels.setdefault(full_name, replace(self._models[name], version=""))
        for full_name, model in self._levels.items():
            at_level = [served for served in shown[model.name] if served.model == full_name]
            self._levels[full_name] = _as_shown(model, at_level)


def _as_shown(model: ServedModel, candidates: Sequence[scheduler_pb2.WorkerModel]) -> ServedModel:
    if not candidates:
        return replace(model, ready=False)
    counts = Counter((served.model, served.version) for served in candidates)
    best = max(counts, key=lambda key: (counts[key], key == (model.full_name, model.version), key))
    chosen = [served for served in candidates if (served.model, served.version) == best]
    if model.version and best[1] != model.version:
        _log.info("model_version", model=model.name, version=best[1], before=model.version)
    return replace(
        model,
        level=best[0].rpartition("@")[2],
        version=best[1],
        max_model_len=max(served.max_model_len for served in chosen),
        fingerprint=min(served.fingerprint for served in chosen),
        ready=True,
        caches=frozenset((served.num_blocks, served.block_size, served.max_model_len) for served in chosen),
    )


def _load_entry(entry: str) -> ServedModel:
    place, separator, names = entry.rpartition("=")
    name, *aliases = names.split("|")
    if not separator or not place or not all((name, *aliases)):
        raise ModelError(f"FOREBAY_MODELS has {entry!r}: it must be PATH=NAME or PATH=NAME|ALIAS")
    return load_model(Path(place), name, aliases)


def load_model(path: Path, name: str, aliases: Sequence[str] = ()) -> ServedModel:
    """Tokenizer, template and shape of a GGUF file or a Hugging Face folder. Raises ModelError."""
    for text in (name, *aliases):
        if not text or len(text) > _MAX_NAME_CHARS or not text.isprintable() or "@" in text:
            raise ModelError(f"{text!r} can't be a model's name: 1 to {_MAX_NAME_CHARS} printable characters without '@'")
    files = model_files.read(path)
    return ServedModel(
        name=name,
        aliases=tuple(alias for alias in dict.fromkeys(aliases) if alias != name),
        tokenizer=files.tokenizer,
        template=_template(name, files.template_source, files.tokenizer.special),
        context_len=files.context_len,
        vocab_size=files.vocab_size,
        created=int(time.time()),
        compiler=None if files.dimensions else Compiler(files.tokenizer, files.vocab_size, _ends(files.tokenizer)),
        dimensions=files.dimensions,
        max_model_len=files.context_len,
    )


def _ends(tokenizer: Tokenizer) -> list[int]:
    """The end token, as far as the tokenizer names it: to check a grammar, no more of them are needed."""
    ends = tokenizer.encode(tokenizer.special.eos, add_special=False)
    return ends if len(ends) == 1 else []


def _template(name: str, source: str | None, special: SpecialTokens) -> ChatTemplate | None:
    """None, and a warning, for a template that can't be read: the model still completes."""
    if source is None:
        return None
    try:
        return ChatTemplate(source, special)
    except ModelError as error:
        _log.warning("chat_template_unusable", model=name, why=str(error))
        return None
