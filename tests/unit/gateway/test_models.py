"""Which models a gateway names, from their own files, and what it learns of them from the fleet."""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.v1 import admin_pb2, scheduler_pb2
from services.gateway.models import Models, ServedModel, load_model
from services.text.gguf_metadata import ModelError
from tests.unit.text.vocabularies import byte_level, byte_level_fields, gguf, smollm2_path

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(byte_level_fields() | {"tokenizer.chat_template": TEMPLATE}))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    byte_level().save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"vocab_size": 640, "max_position_embeddings": 4096}))
    return path


def test_a_gguf_file(gguf_file: Path) -> None:
    model = load_model(gguf_file, "tiny", ["small", "tiny", "small"])
    assert (model.name, model.aliases, model.full_name) == ("tiny", ("small",), "tiny@")
    assert (model.context_len, model.max_model_len, model.vocab_size) == (512, 512, len(byte_level().get_vocab()))
    assert (model.ready, model.version) == (False, "")
    assert model.template is not None
    assert model.template.render([{"role": "user", "content": "hi"}]) == "hi"


def test_the_real_model() -> None:
    model = load_model(smollm2_path(), "smollm2")
    assert (model.context_len, model.vocab_size) == (8192, 49152)
    assert model.template is not None


@pytest.mark.parametrize(
    ("options", "own_file", "rendered"),
    [
        ({}, None, None), ({"chat_template": "a"}, None, "a"), ({"chat_template": "a"}, "b", "b"), ({}, "b", "b"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}, None, "d"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}]}, None, None), ({"chat_template": 5}, None, None),
        ({"chat_template": "{% broken"}, None, None),
    ],
)  # fmt: skip
def test_the_template_of_a_folder(folder: Path, options: dict[str, Any], own_file: str | None, rendered: str | None) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    if own_file is not None:
        (folder / "chat_template.jinja").write_text(own_file)
    model = load_model(folder, "m")
    assert (model.context_len, model.vocab_size) == (4096, 640)
    assert (None if model.template is None else model.template.render([])) == rendered


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ("", "no model is named"), (" , ", "no model is named"), ("PATH", "must be PATH=NAME"), ("PATH=", "must be PATH=NAME"),
        ("=a", "must be PATH=NAME"),
        ("PATH=a|", "must be PATH=NAME"), ("PATH=a||b", "must be PATH=NAME"), ("PATH=a,PATH=a", "two models are called 'a'"),
        ("PATH=a,PATH=b|a", "two models are called 'a'"), ("PATH=a@fp32", "can't be a model's name"),
        ("PATH=a\nb", "can't be a model's name"),
        ("/nowhere/x.gguf=a", "no such file"),
    ],
)  # fmt: skip
def test_entries_that_cannot_be_used(gguf_file: Path, entries: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        Models.from_entries(entries.replace("PATH", str(gguf_file)))


def test_a_refusal_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(gguf(byte_level_fields("unheard-of")))
    with pytest.raises(ModelError, match=r"odd\.gguf.*unheard-of"):
        Models.from_entries(f"{path}=odd")


def test_names_and_aliases(gguf_file: Path, folder: Path) -> None:
    models = Models.from_entries(f"{gguf_file}=b|bee, {folder}=a")
    assert [model.name for model in models.list()] == ["a", "b"]
    assert models.get("bee") is models.get("b") is not None
    for name in ("c", "", "B", "b@fp32", "a\nb"):
        assert models.get(name) is None
        assert models.at(name, "fp32") is None


def worker(model: str = "a@fp32", version: str = "v1", *, ready: bool = True, **fields: Any) -> admin_pb2.WorkerState:
    defaults: dict[str, Any] = {"loaded": True, "max_model_len": 100, "fingerprint": "f"}
    served = scheduler_pb2.WorkerModel(model=model, version=version, **(defaults | fields))
    return admin_pb2.WorkerState(registration=scheduler_pb2.Register(models=[served]), ready=ready)


@pytest.fixture
def models(gguf_file: Path) -> Models:
    return Models.from_entries(f"{gguf_file}=a|alias")


def seen(models: Models, *workers: admin_pb2.WorkerState) -> ServedModel:
    models.update_fleet(admin_pb2.GetFleetResponse(workers=workers))
    model = models.get("a")
    assert model is not None
    return model


def test_live_facts(models: Models) -> None:
    before = models.get("alias")
    now = seen(models, worker("a@int4", "v1", max_model_len=64, fingerprint="int4-x"), worker("other@fp32", "v9"))
    assert (now.full_name, now.version, now.max_model_len, now.fingerprint, now.ready) == ("a@int4", "v1", 64, "int4-x", True)
    assert models.get("alias") is now
    assert before is not None
    assert not before.ready, "a request keeps the model as it was admitted with"


@pytest.mark.parametrize("worker_state", [worker(ready=False), worker(loaded=False), worker("other@fp32"), worker("a"), worker("A@fp32")])
def test_what_does_not_make_a_model_ready(models: Models, worker_state: admin_pb2.WorkerState) -> None:
    now = seen(models, worker_state)
    assert not now.ready
    assert now.version == ""


def test_a_model_whose_workers_are_gone_keeps_its_version(models: Models) -> None:
    seen(models, worker(version="v1"))
    now = seen(models)
    assert (now.ready, now.version, now.max_model_len) == (False, "v1", 100)


def test_most_workers_decide_on_the_version_and_a_tie_changes_nothing(models: Models) -> None:
    old, new = worker(version="v1", max_model_len=50), worker(version="v2", max_model_len=70)
    assert seen(models, old).version == "v1"
    assert seen(models, old, new).version == "v1"
    assert seen(models, new, old).version == "v1"
    assert seen(models, new, old, new).version == "v2"
    assert seen(models, new, old).version == "v2"
    assert seen(models, old).version == "v1"


def test_each_level_that_was_seen_has_its_own_facts(models: Models) -> None:
    seen(models, worker("a@int4", "v1"), worker("a@int4", "v1"), worker("a@fp32", "v2", max_model_len=70))
    most, other = models.get("a"), models.at("alias", "fp32")
    assert most is not None
    assert other is not None
    assert (most.full_name, models.at("a", "int4")) == ("a@int4", most)
    assert (other.full_name, other.version, other.max_model_len, other.ready) == ("a@fp32", "v2", 70, True)
    assert models.at("a", "bf16") is None
    seen(models, worker("a@int4", "v1"))
    gone = models.at("a", "fp32")
    assert gone is not None
    assert not gone.ready


def test_the_longest_of_one_version_counts(models: Models) -> None:
    workers = [worker(max_model_len=50), worker(max_model_len=70), worker(version="v2", max_model_len=900)]
    assert seen(models, *workers).max_model_len == 70


def test_a_share_of_the_largest_cache_bounds_what_an_org_holds(models: Models) -> None:
    model = seen(models, worker(num_blocks=64, block_size=16, max_model_len=1024), worker(num_blocks=99, block_size=16))
    assert [model.most_held(share) for share in (0.0, 0.01, 0.25, 0.99, 1.0)] == [0, 16, 256, 1008, 0]
