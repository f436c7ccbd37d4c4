"""Inside the workers."""

from tools.dashboards.dashboard import Dashboard, Panel, Variable
from tools.dashboards.queries import RATE, per_second, quantiles, share

_ENGINE = '{instance=~"$instance", model_name=~"$model", engine="0"}'
_EMBED = "no model that embeds"
_GPU = "a worker on a CPU has no GPU"
ENGINE = Dashboard(
    "forebay-engine",
    "Forebay / Engine",
    "Inside the workers: batches, steps, cache, drafts, devices. The names are vLLM's and DCGM's, so their dashboards fit as well.",
    (
        (
            "Now",
            (
                Panel("Running", {"": f"sum(vllm:num_requests_running{_ENGINE})"}, stat=True),
                Panel("Waiting for room", {"": f"sum(vllm:num_requests_waiting{_ENGINE})"}, stat=True),
                Panel("Cache in use", {"": f"max(vllm:kv_cache_usage_perc{_ENGINE})"}, "percentunit", stat=True),
                Panel("Output tokens", {"": f"sum(rate(vllm:generation_tokens_total{_ENGINE}{RATE}))"}, note="Per second.", stat=True),
                Panel("theta_max", {"": f"sum(forebay_worker_theta_max{_ENGINE})"}, "reqps", stat=True),
                Panel("Step loop healthy", {"": f"min(forebay_worker_step_loop_healthy{_ENGINE})"}, stat=True),
            ),
        ),
        (
            "Latency",
            (
                Panel("Time to first token", quantiles("vllm:time_to_first_token_seconds", where=_ENGINE), "s", traces=True),
                Panel("Time between tokens", quantiles("vllm:inter_token_latency_seconds", where=_ENGINE), "s"),
                Panel("Whole request", quantiles("vllm:e2e_request_latency_seconds", where=_ENGINE), "s", traces=True),
                Panel(
                    "Where a request's time goes",
                    {
                        name: f"sum(rate(vllm:request_{name}_time_seconds_sum{_ENGINE}{RATE}))"
                        f" / sum(rate(vllm:request_{name}_time_seconds_count{_ENGINE}{RATE}))"
                        for name in ("queue", "prefill", "decode")
                    },
                    "s",
                    "Means.",
                ),
            ),
        ),
        (
            "Steps",
            (
                Panel("Steps per second", per_second("forebay_worker_steps_total", "instance", _ENGINE), "ops"),
                Panel(
                    "Seconds of a step",
                    {"{{instance}}": share("forebay_worker_step_seconds_total", "forebay_worker_steps_total", "instance", _ENGINE)},
                    "s",
                ),
                Panel("Tokens of a step", quantiles("vllm:iteration_tokens_total", where=_ENGINE)),
                Panel("Error of foretold steps", {"{{instance}}": f"forebay_worker_step_time_error{_ENGINE}"}, "percentunit"),
            ),
        ),
        (
            "Batch",
            (
                Panel("Running", {"{{instance}}": f"vllm:num_requests_running{_ENGINE}"}),
                Panel("Waiting for room", {"{{instance}}": f"vllm:num_requests_waiting{_ENGINE}"}),
                Panel("Share of theta_max", {"{{instance}}": f"forebay_worker_theta_share{_ENGINE}"}, "percentunit"),
                Panel("Ended by reason", per_second("vllm:request_success_total", "finished_reason", _ENGINE), "reqps"),
            ),
        ),
        (
            "Cache",
            (
                Panel("In use", {"{{instance}}": f"vllm:kv_cache_usage_perc{_ENGINE}"}, "percentunit"),
                Panel("Prompt tokens by source", per_second("vllm:prompt_tokens_by_source_total", "source", _ENGINE), note="Per second."),
                Panel(
                    "Hits",
                    {
                        "device": share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", where=_ENGINE),
                        "host": share("vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total", where=_ENGINE),
                    },
                    "percentunit",
                ),
                Panel(
                    "Host blocks",
                    {
                        "in use {{instance}}": f"forebay_worker_host_cache_usage{_ENGINE}",
                        "out per second": f"sum(rate(forebay_worker_copied_out_blocks_total{_ENGINE}{RATE}))",
                        "in per second": f"sum(rate(forebay_worker_copied_in_blocks_total{_ENGINE}{RATE}))",
                    },
                ),
            ),
        ),
        (
            "Preemption and drafts",
            (
                Panel(
                    "Preemptions",
                    {
                        "for a class": f"sum(rate(forebay_worker_class_preemptions_total{_ENGINE}{RATE}))",
                        "for growth": f"sum(rate(forebay_worker_capacity_preemptions_total{_ENGINE}{RATE}))",
                        "swapped": f"sum(rate(forebay_worker_swaps_total{_ENGINE}{RATE}))",
                    },
                    "ops",
                ),
                Panel(
                    "Drafts accepted",
                    {"": share("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total", where=_ENGINE)},
                    "percentunit",
                ),
                Panel("Accepted by position", per_second("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position", _ENGINE), "ops"),
                Panel(
                    "Computed over generated",
                    {"": share("forebay_worker_computed_tokens_total", "vllm:generation_tokens_total", where=_ENGINE)},
                    note="Prompts, recomputation and drafts on top of 1.",
                ),
            ),
        ),
        (
            "Lengths",
            (
                Panel("Prompt tokens", quantiles("vllm:request_prompt_tokens", where=_ENGINE)),
                Panel("Output tokens", quantiles("vllm:request_generation_tokens", where=_ENGINE)),
                Panel("Refused for want of room", per_second("forebay_worker_refused_requests_total", "instance", _ENGINE), "reqps"),
            ),
        ),
        (
            "Embeddings",
            (
                Panel("Inputs per second", per_second("forebay_worker_embedded_inputs_total", "model_name"), "ops", idle=_EMBED),
                Panel("Tokens per second", per_second("forebay_worker_embedded_tokens_total", "model_name"), "ops", idle=_EMBED),
                Panel("Requests that wait", {"{{model_name}}": "sum by (model_name) (forebay_worker_embed_waiting)"}, idle=_EMBED),
            ),
        ),
        (
            "GPU",
            (
                Panel("Busy", {"{{Hostname}} {{gpu}}": "DCGM_FI_DEV_GPU_UTIL"}, "percent", idle=_GPU),
                Panel(
                    "Memory",
                    {"used {{Hostname}} {{gpu}}": "DCGM_FI_DEV_FB_USED", "free {{Hostname}} {{gpu}}": "DCGM_FI_DEV_FB_FREE"},
                    "decmbytes",
                    idle=_GPU,
                ),
                Panel("Temperature", {"{{Hostname}} {{gpu}}": "DCGM_FI_DEV_GPU_TEMP"}, "celsius", idle=_GPU),
                Panel("Power", {"{{Hostname}} {{gpu}}": "DCGM_FI_DEV_POWER_USAGE"}, "watt", idle=_GPU),
            ),
        ),
        (
            "Host",
            (
                Panel(
                    "Memory",
                    {"{{instance}}": "forebay_host_memory_used_bytes / forebay_host_memory_total_bytes"},
                    "percentunit",
                    "Of workers on a CPU.",
                ),
                Panel(
                    "Temperature", {"{{instance}}": "forebay_host_temperature_celsius"}, "celsius", idle="not every processor has a sensor"
                ),
            ),
        ),
    ),
    (
        Variable("model", "vllm:num_requests_running", "model_name", "Model"),
        Variable("instance", "vllm:num_requests_running", "instance", "Worker"),
    ),
)
