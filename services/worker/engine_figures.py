"""What the engine counts, as Prometheus asks for it: under vLLM's names where vLLM has the figure, else forebay_worker_*.

Read from the engine's own counters at each scrape, so that a step pays nothing for them.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from services.common.metrics import Figure, Rows
from services.worker.engine.encoder import EncoderStats
from services.worker.engine.engine import EngineStats
from services.worker.sharing.device import Stats

LABELS = ("model_name", "engine")

OfOne = TypeVar("OfOne", EngineStats, EncoderStats)
Read = Callable[[EngineStats], float]
Split = Callable[[EngineStats], list[tuple[str, float]]]
"""Values of the one label more, each with its figure."""

_GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("vllm:num_requests_running", "Sequences in the running batch.", lambda s: s.num_running),
    ("vllm:num_requests_waiting", "Sequences that wait for room.", lambda s: s.num_waiting),
    ("vllm:kv_cache_usage_perc", "Share of cache blocks in use, 0 .. 1.", lambda s: s.num_used_blocks / s.num_blocks),
    ("vllm:gpu_cache_usage_perc", "The same under its older name.", lambda s: s.num_used_blocks / s.num_blocks),
    (
        "forebay_worker_host_cache_usage",
        "Share of host blocks that hold one, 0 .. 1.",
        lambda s: s.num_held_host_blocks / max(1, s.num_host_blocks),
    ),
    ("forebay_worker_step_time_error", "Mean relative error of foretold step times, 0: none.", lambda s: s.step_time_error),
)
_COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("vllm:prompt_tokens", "Prompt tokens of requests that were admitted.", lambda s: s.num_prefix_query_tokens),
    (
        "vllm:prompt_tokens_cached",
        "Those of them found in a cache.",
        lambda s: s.num_prefix_hit_tokens + s.num_host_hit_tokens,
    ),
    ("vllm:generation_tokens", "Tokens generated.", lambda s: s.num_generated_tokens),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.num_prefix_query_tokens),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.num_prefix_hit_tokens),
    ("vllm:external_prefix_cache_queries", "Prompt tokens that the host was asked for.", lambda s: s.num_host_query_tokens),
    ("vllm:external_prefix_cache_hits", "Prompt tokens that came back from the host.", lambda s: s.num_host_hit_tokens),
    ("vllm:num_preemptions", "Preempted sequences.", lambda s: s.num_preemptions),
    ("vllm:spec_decode_num_drafts", "Verifications: a sequence's drafts in one step.", lambda s: s.num_drafts),
    ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", lambda s: s.num_draft_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", lambda s: s.num_accepted_tokens),
    ("forebay_worker_computed_tokens", "Tokens computed, recomputed ones and drafts among them.", lambda s: s.num_computed_tokens),
    ("forebay_worker_copied_out_blocks", "Cache blocks copied to the host.", lambda s: s.num_copied_out_blocks),
    ("forebay_worker_copied_in_blocks", "Cache blocks copied back from the host.", lambda s: s.num_copied_in_blocks),
    ("forebay_worker_class_preemptions", "Preemptions in favour of a more urgent class.", lambda s: s.num_class_preemptions),
    ("forebay_worker_capacity_preemptions", "Preemptions so that others could grow.", lambda s: s.num_capacity_preemptions),
    ("forebay_worker_swaps", "Preemptions after which nothing is computed again; the others recompute.", lambda s: s.num_swaps),
    ("forebay_worker_swapped_blocks", "Cache blocks kept for preempted sequences.", lambda s: s.num_swapped_blocks),
    ("forebay_worker_swapped_tokens", "Tokens that preempted sequences needn't compute again.", lambda s: s.num_swapped_tokens),
)
_SPLIT_GAUGES: tuple[tuple[str, str, str, Split], ...] = (
    (
        "vllm:num_requests_waiting_by_reason",
        "Sequences that wait, by what for; nothing here is deferred for anything but room.",
        "reason",
        lambda s: [("capacity", s.num_waiting), ("deferred", 0)],
    ),
    (
        "forebay_worker_step_time_seconds",
        "What a step takes, as fitted to those that were: of itself (step), and for each token, row of logits and key read.",
        "per",
        lambda s: list(zip(("step", "token", "row", "key"), s.step_time or (), strict=False)),
    ),
)
_SPLIT_COUNTERS: tuple[tuple[str, str, str, Split], ...] = (
    (
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by where their keys and values came from.",
        "source",
        lambda s: [
            ("local_compute", s.num_prefix_query_tokens - s.num_prefix_hit_tokens - s.num_host_hit_tokens),
            ("local_cache_hit", s.num_prefix_hit_tokens),
            ("external_kv_transfer", s.num_host_hit_tokens),
        ],
    ),
    (
        "vllm:prompt_tokens_cached_by_source",
        "Prompt tokens found in a cache, by which.",
        "source",
        lambda s: [("device", s.num_prefix_hit_tokens), ("host", s.num_host_hit_tokens)],
    ),
    (
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by their position in the draft.",
        "position",
        lambda s: [(str(i), sum(s.num_spans_by_accepted[i + 1 :])) for i in range(len(s.num_spans_by_accepted) - 1)],
    ),
)


_ENCODER_GAUGES: tuple[tuple[str, str, Callable[[EncoderStats], float]], ...] = (
    ("forebay_worker_embed_running", "Requests for vectors of which some inputs were computed.", lambda s: s.num_running),
    ("forebay_worker_embed_waiting", "Requests for vectors of which no input was computed yet.", lambda s: s.num_waiting),
)
_ENCODER_COUNTERS: tuple[tuple[str, str, Callable[[EncoderStats], float]], ...] = (
    ("forebay_worker_embedded_inputs", "Inputs turned into vectors.", lambda s: s.num_inputs),
    ("forebay_worker_embedded_tokens", "Their tokens.", lambda s: s.num_computed_tokens),
)


def figures(all_stats: Callable[[], Mapping[str, Stats]]) -> Iterator[Figure]:
    """One for each name, with the series of every model that has it. `all_stats` gives the engines' as they are, by model."""

    def stats() -> Mapping[str, EngineStats]:
        return {model: s for model, s in all_stats().items() if isinstance(s, EngineStats)}

    def encoders() -> Mapping[str, EncoderStats]:
        return {model: s for model, s in all_stats().items() if isinstance(s, EncoderStats)}

    for encoder_table, is_counter in ((_ENCODER_GAUGES, False), (_ENCODER_COUNTERS, True)):
        for name, text, read_encoder in encoder_table:
            yield Figure(name, text, _one(encoders, read_encoder), LABELS, counter=is_counter)
    for table, is_counter in ((_GAUGES, False), (_COUNTERS, True)):
        for name, text, read in table:
            yield Figure(name, text, _one(stats, read), LABELS, counter=is_counter)
    for split_table, is_counter in ((_SPLIT_GAUGES, False), (_SPLIT_COUNTERS, True)):
        for name, text, label, split in split_table:
            yield Figure(name, text, _several(stats, split), (*LABELS, label), counter=is_counter)


def _one(stats: Callable[[], Mapping[str, OfOne]], read: Callable[[OfOne], float]) -> Callable[[], Rows]:
    return lambda: [((model, "0"), read(s)) for model, s in stats().items()]


def _several(stats: Callable[[], Mapping[str, EngineStats]], split: Split) -> Callable[[], Rows]:
    return lambda: [((model, "0", value), figure) for model, s in stats().items() for value, figure in split(s)]
