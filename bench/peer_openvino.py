"""OpenVINO GenAI's continuous batching with closed-loop clients around it, in the Python of its own environment.

Reads loads as JSON lines from standard input and answers each with its requests' timings. Imports nothing of Forebay.
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai


def opened(options: dict[str, Any]) -> Any:
    """The pipeline with the model loaded."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = options["cache_gb"]
    scheduler.enable_prefix_caching = options["prefix_cache"]
    properties = {"INFERENCE_NUM_THREADS": options["num_threads"]}
    return genai.ContinuousBatchingPipeline(options["folder"], scheduler, "CPU", properties)


def run(pipeline: Any, prompts: list[list[int]], concurrency: int, max_tokens: int) -> Iterator[dict[str, Any]]:
    """Asks for all prompts, so many at once; a request's timing when it has ended."""
    config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
    waiting = iter(enumerate(prompts))
    live: dict[int, tuple[Any, dict[str, Any]]] = {}

    def admit() -> None:
        for number, prompt in waiting:
            timing = {"start": time.perf_counter(), "arrivals": [], "tokens": [], "end": 0.0}
            live[number] = (pipeline.add_request(number, ov.Tensor(np.array([prompt], np.int64)), config), timing)
            return

    for _ in range(concurrency):
        admit()
    while live:
        pipeline.step()
        now = time.perf_counter()
        for number, (handle, timing) in list(live.items()):
            while handle.can_read():
                for output in handle.read().values():
                    timing["arrivals"].append(now)
                    timing["tokens"].append(len(output.generated_ids))
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                timing["end"] = now
                if sum(timing["tokens"]) != max_tokens:
                    raise RuntimeError(f"request {number} has {sum(timing['tokens'])} tokens, not {max_tokens}")
                del live[number]
                yield timing
                admit()


def main() -> None:
    """Loads, says so, answers until standard input ends."""
    pipeline = opened(json.loads(sys.argv[1]))
    print(json.dumps({"timings": []}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"timings": list(run(pipeline, **json.loads(line)))}), flush=True)


if __name__ == "__main__":
    main()
