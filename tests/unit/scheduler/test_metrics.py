"""What a scheduler shows is what holds when it is asked; what has gone has no series."""

from services.scheduler.metrics import DECISIONS, Metrics, State


def test_queues_and_workers_are_shown_as_they_are_now() -> None:
    lines = {("tiny@fp32", 1): (3, 1.5), ("tiny@fp32", 3): (9, 60.0)}
    ages = {"w1": 0.2, "w2": 4.0}
    metrics = Metrics()
    metrics.show(
        State(
            lines=lambda: lines,
            waiting=lambda: {"tiny@fp32": 12, "other@fp32": 0},
            workers_ready=lambda: {"tiny@fp32": len(ages)},
            heartbeat_ages=lambda: ages,
            sharing_loads=lambda: {"w1": 0.5},
            num_leases=lambda: 5,
            num_streams=lambda: 12,
            redis_away=lambda: True,
            num_redis_failures=lambda: 7,
            policy_refused=lambda: False,
            num_policy_failures=lambda: 1,
            open_batches=lambda: 2,
            stored_bytes=lambda: 30,
        )
    )

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    realtime = {"model": "tiny@fp32", "latency_class": "realtime"}
    assert (value("forebay_queue_depth", **realtime), value("forebay_queue_oldest_seconds", **realtime)) == (3, 1.5)
    assert value("forebay_queue_depth", model="tiny@fp32", latency_class="batch") == 9
    assert value("forebay_worker_heartbeat_age_seconds", worker="w2") == 4
    assert value("forebay_sharing_load", worker="w1") == 0.5
    assert [value("vllm:num_requests_waiting", model_name=f"{name}@fp32", engine="queue") for name in ("tiny", "other")] == [12, 0]
    assert [value(f"forebay_{name}") for name in ("leases", "place_streams", "redis_away", "policy_refused")] == [5, 12, 1, 0]
    assert [value(f"forebay_{name}_total") for name in ("redis_failures", "policy_failures")] == [7, 1]
    assert [value(f"forebay_{name}") for name in ("batches_open", "batch_stored_bytes")] == [2, 30]
    assert all(value("forebay_decisions_total", reason=reason) == 0 for reason in DECISIONS)
    del lines["tiny@fp32", 1], ages["w2"]
    assert value("forebay_queue_depth", **realtime) is None
    assert value("forebay_worker_heartbeat_age_seconds", worker="w2") is None
    assert value("forebay_workers_ready", model="tiny@fp32") == 1
