"""Packed weights in a file: the same numbers as those packed anew, mapped, and nothing read that somebody else could have written."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from services.worker.engine import backend, packed_file
from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine
from services.worker.engine.kernels import library
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.models.native import NativeDecoder
from services.worker.engine.request import EngineRequest
from tests.engine_harness import endings, greedy, run
from tests.tiny_models import kernels, save_model

CONFIG = EngineConfig(num_threads=1, num_blocks=64, level="int8", backend="native", max_packed_bytes=1 << 30)
REQUESTS = [EngineRequest(f"r{i}", [i, 1, 2, 3], greedy(12, temperature=i % 2, seed=i)) for i in range(6)]


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find", kernels)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model("qwen3", tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "home" / "weights"


def decoder_of(engine: Engine) -> NativeDecoder:
    assert isinstance(engine.runner, ModelRunner)
    assert isinstance(engine.runner.model, NativeDecoder)
    return engine.runner.model


def is_mapped(engine: Engine, folder: Path) -> bool:
    """Whether the weights lie in a file of `folder`, as the system sees it."""
    address = decoder_of(engine).weights.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return str(folder) in line and line.split()[1] == "r--s"
    raise AssertionError("weights are nowhere")


@pytest.mark.parametrize("level", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama-tied"])
def test_mapped_weights_say_what_those_packed_here_say(tmp_path: Path, folder: Path, level: str, name: str) -> None:
    save_model(name, tmp_path / name)
    own = replace(CONFIG, level=level)
    mapped = replace(own, packed_folder=folder)
    expected = endings(run(Engine.from_path(tmp_path / name, own), REQUESTS))
    first, second = Engine.from_path(tmp_path / name, mapped), Engine.from_path(tmp_path / name, mapped)
    assert is_mapped(first, folder)
    assert is_mapped(second, folder)
    assert endings(run(first, REQUESTS)) == endings(run(second, REQUESTS)) == expected
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_start_reads_no_weight_that_is_there_packed(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, packed_folder=folder)
    Engine.from_path(model, config)

    def never(*_: object) -> None:
        raise AssertionError("it packs")

    monkeypatch.setattr(NativeDecoder, "_pack", never)
    assert is_mapped(Engine.from_path(model, config), folder)


def test_other_weights_levels_and_shapes_have_files_of_their_own(tmp_path: Path, folder: Path) -> None:
    for name, level in (("qwen3", "int8"), ("qwen3", "bf16"), ("llama", "int8")):
        if not (tmp_path / name).exists():
            save_model(name, tmp_path / name)
        Engine.from_path(tmp_path / name, replace(CONFIG, level=level, packed_folder=folder))
    assert len(list(folder.iterdir())) == 3
    assert packed_file.file_of(folder, "a", "bc") != packed_file.file_of(folder, "ab", "c")


@pytest.mark.parametrize("damage", ["short", "header", "weights", "magic", "empty"])
def test_a_damaged_file_is_packed_anew(model: Path, folder: Path, damage: str) -> None:
    config = replace(CONFIG, packed_folder=folder)
    expected = endings(run(Engine.from_path(model, config), REQUESTS))
    (file,) = folder.iterdir()
    whole = bytearray(file.read_bytes())
    if damage == "short":
        del whole[-1:]
    elif damage == "empty":
        whole.clear()
    else:
        whole[{"header": 80, "weights": len(whole) - 5, "magic": 0}[damage]] ^= 1
    file.write_bytes(whole)
    engine = Engine.from_path(model, config)
    assert endings(run(engine, REQUESTS)) == expected
    assert is_mapped(engine, folder)
    assert packed_file.find(file) is not None


@pytest.mark.parametrize("who", ["others may write the file", "others may write the folder", "a link", "another's file"])
def test_what_somebody_else_may_have_written_is_not_read(model: Path, folder: Path, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, packed_folder=folder)
    expected = endings(run(Engine.from_path(model, config), REQUESTS))
    (file,) = folder.iterdir()
    if who == "others may write the file":
        file.chmod(0o620)
    elif who == "others may write the folder":
        folder.chmod(0o772)
    elif who == "a link":
        file.rename(folder.parent / "elsewhere")
        file.symlink_to(folder.parent / "elsewhere")
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    engine = Engine.from_path(model, config)
    assert not is_mapped(engine, folder)
    assert endings(run(engine, REQUESTS)) == expected


def test_the_least_recently_used_file_gives_way_and_who_has_it_keeps_it(tmp_path: Path, folder: Path) -> None:
    for name in ("qwen3", "llama", "mistral"):
        save_model(name, tmp_path / name)
    config = replace(CONFIG, packed_folder=folder)
    first = Engine.from_path(tmp_path / "qwen3", config)
    (old,) = folder.iterdir()
    Engine.from_path(tmp_path / "llama", config)
    (other,) = set(folder.iterdir()) - {old}
    os.utime(old, (1, 1))
    bound = old.stat().st_size + other.stat().st_size + 9000
    Engine.from_path(tmp_path / "mistral", replace(config, max_packed_bytes=bound))
    assert not old.exists()
    assert other.exists()
    assert endings(run(first, REQUESTS)) == endings(run(Engine.from_path(tmp_path / "qwen3", CONFIG), REQUESTS))


@pytest.mark.parametrize("why", ["bound", "read-only"])
def test_where_nothing_can_be_written_weights_are_the_workers_own(model: Path, folder: Path, why: str) -> None:
    if why == "read-only":
        folder.parent.write_text("no folder")
    engine = Engine.from_path(model, replace(CONFIG, packed_folder=folder, max_packed_bytes=1000 if why == "bound" else 1 << 30))
    assert not is_mapped(engine, folder)
    assert endings(run(engine, REQUESTS)) == endings(run(Engine.from_path(model, CONFIG), REQUESTS))


def test_workers_that_start_together_map_one_file(model: Path, folder: Path) -> None:
    engines: list[Engine] = []
    config = replace(CONFIG, packed_folder=folder)
    threads = [threading.Thread(target=lambda: engines.append(Engine.from_path(model, config))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (file,) = folder.iterdir()
    inodes = set()
    for engine in engines:
        assert is_mapped(engine, folder)
        packed = decoder_of(engine)._packed
        assert packed is not None
        inodes.add(packed.path.stat().st_ino)
    assert inodes == {file.stat().st_ino}


def test_a_file_that_was_cut_short_is_seen_before_it_is_read(model: Path, folder: Path) -> None:
    decoder = decoder_of(Engine.from_path(model, replace(CONFIG, packed_folder=folder)))
    place = decoder.weights.clone()
    (file,) = folder.iterdir()
    os.truncate(file, 5000)
    with pytest.raises(OSError, match="cut short while it was in use"):
        decoder.move(place)


def test_the_code_that_packs_is_part_of_the_name() -> None:
    assert len(backend._packing_code()) == 64
