"""The mesh as a whole."""

from tools.dashboards.dashboard import Dashboard, Panel
from tools.dashboards.queries import RATE, per_second, quantiles, share

FLEET = Dashboard(
    "forebay-fleet",
    "Forebay / Fleet",
    "The mesh as a whole: what comes, what waits, what keeps its promise, and who serves it.",
    (
        (
            "Now",
            (
                Panel("Requests", {"": f"sum(rate(forebay_requests_total{RATE}))"}, "reqps", stat=True),
                Panel("Output tokens", {"": f"sum(rate(forebay_output_tokens_total{RATE}))"}, "short", "Per second.", stat=True),
                Panel("Waiting", {"": "sum(max by (model, latency_class) (forebay_queue_depth)) or vector(0)"}, stat=True),
                Panel("Running", {"": "sum(vllm:num_requests_running)"}, stat=True),
                Panel("Workers ready", {"{{model}}": "max by (model) (forebay_workers_ready)"}, stat=True),
                Panel(
                    "Targets met",
                    {"": share("forebay_slo_met_total", "forebay_slo_requests_total")},
                    "percentunit",
                    "Goodput: of the requests whose class has targets, those that met the first token's and each further token's.",
                    stat=True,
                ),
            ),
        ),
        (
            "What clients see",
            (
                Panel("Requests by status", per_second("forebay_requests_total", "status"), "reqps"),
                Panel("Time to first token", quantiles("forebay_time_to_first_token_seconds", "latency_class"), "s", traces=True),
                Panel("Time between tokens", quantiles("forebay_inter_token_seconds", "latency_class"), "s"),
                Panel("Whole request", quantiles("forebay_request_seconds", "latency_class"), "s", traces=True),
            ),
        ),
        (
            "Promises",
            (
                Panel(
                    "Targets met by class",
                    {"{{latency_class}}": share("forebay_slo_met_total", "forebay_slo_requests_total", "latency_class")},
                    "percentunit",
                ),
                Panel(
                    "Targets missed over windows",
                    {
                        "{{latency_class}} 5 min": "forebay:slo_missed:ratio_rate5m",
                        "{{latency_class}} 1 h": "forebay:slo_missed:ratio_rate1h",
                    },
                    "percentunit",
                    "What the burn-rate alerts look at; 1 % is the objective.",
                ),
                Panel("Calls by status", per_second("forebay_calls_total", "status"), "reqps", "HTTP and gRPC, refused ones among them."),
                Panel("Errors of ours", {"": "forebay:errors:ratio_rate5m"}, "percentunit"),
            ),
        ),
        (
            "Queue",
            (
                Panel(
                    "Waiting by class",
                    {"{{model}} {{latency_class}}": "max by (model, latency_class) (forebay_queue_depth)"},
                    idle="a queue that is empty has no series",
                ),
                Panel("Wait until placed", quantiles("forebay_queue_wait_seconds", "latency_class"), "s", traces=True),
                Panel(
                    "Oldest waiting",
                    {"{{model}} {{latency_class}}": "max by (model, latency_class) (forebay_queue_oldest_seconds)"},
                    "s",
                    idle="a queue that is empty has no series",
                ),
                Panel(
                    "Shed",
                    {"{{model}} {{latency_class}}": f"sum by (model, latency_class) (rate(forebay_shed_total{RATE}))"},
                    "reqps",
                    idle="has series once something was shed",
                ),
            ),
        ),
        (
            "Decisions",
            (
                Panel("Placements by class", per_second("forebay_placements_total", "latency_class"), "reqps"),
                Panel(
                    "What placements counted on",
                    per_second("forebay_decisions_total", "reason"),
                    "reqps",
                    "free, preempts, waits; or what didn't hold at the commit: another scheduler was quicker, mostly.",
                ),
                Panel("Ended by reason", per_second("forebay_finished_total", "reason"), "reqps"),
                Panel("Quota refusals", per_second("forebay_quota_refused_total", "kind"), "reqps"),
            ),
        ),
        (
            "Capacity",
            (
                Panel(
                    "Share of theta_max",
                    {"{{model_name}}": "forebay:theta_share:ratio"},
                    "percentunit",
                    "What the workers served of what lengths, cache and step times allow. Near 1 the fleet is full.",
                ),
                Panel("Engines busy", {"{{instance}}": "forebay:worker_busy:ratio_rate1m"}, "percentunit"),
                Panel("Cache in use", {"{{instance}}": "vllm:kv_cache_usage_perc"}, "percentunit"),
                Panel(
                    "Preemptions and moves",
                    {
                        "for a class": f"sum(rate(forebay_worker_class_preemptions_total{RATE}))",
                        "for growth": f"sum(rate(forebay_worker_capacity_preemptions_total{RATE}))",
                        "placed again": f"sum(rate(forebay_replacements_total{RATE}))",
                        "moved with tokens": f"sum(rate(forebay_migrations_total{RATE}))",
                    },
                    "ops",
                ),
            ),
        ),
        (
            "Services",
            (
                Panel("Up", {"{{job}} {{instance}}": 'up{job=~"forebay-.+"}'}),
                Panel("Heartbeat age", {"{{worker}}": "min by (worker) (forebay_worker_heartbeat_age_seconds)"}, "s"),
                Panel(
                    "Redis and policy",
                    {
                        "Redis away {{instance}}": "forebay_redis_away",
                        "Redis failures {{instance}}": f"rate(forebay_redis_failures_total{RATE})",
                        "policy refused {{instance}}": "forebay_policy_refused",
                    },
                ),
                Panel("Leases", {"leases": "max(forebay_leases)", "streams waiting": "sum(forebay_place_streams)"}),
            ),
        ),
        (
            "Processes",
            (
                Panel("CPU", {"{{instance}}": f'rate(process_cpu_seconds_total{{job=~"forebay-.+"}}{RATE})'}, "percentunit"),
                Panel("Memory", {"{{instance}}": 'process_resident_memory_bytes{job=~"forebay-.+"}'}, "bytes"),
                Panel("Open files", {"{{instance}}": 'process_open_fds{job=~"forebay-.+"}'}),
                Panel("Event loop lag", quantiles("forebay_event_loop_lag_seconds", "instance", points=(0.9,)), "s"),
            ),
        ),
    ),
)
