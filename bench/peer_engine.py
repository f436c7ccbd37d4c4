"""Forebay's engine alone, with closed-loop clients around it in its own process: what the mesh could reach if serving cost nothing.

Reads loads as JSON lines from standard input and answers each with its requests' timings, as peer_openvino does.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine, EngineRequest, SamplingParams


def opened(options: dict[str, Any]) -> Engine:
    """The engine with the model loaded."""
    blocks = options["max_sequences"] * -(-options["max_length"] // EngineConfig.block_size)
    config = EngineConfig(
        num_blocks=blocks,
        max_sequences=options["max_sequences"],
        max_step_tokens=options["max_step_tokens"],
        level=options["level"],
        num_threads=options["num_threads"],
        prefix_cache=options["prefix_cache"],
    )
    return Engine.from_path(Path(options["path"]), config)


def run(engine: Engine, prompts: list[list[int]], concurrency: int, max_tokens: int) -> Iterator[dict[str, Any]]:
    """Asks for all prompts, so many at once; a request's timing when it has ended."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    waiting = iter(enumerate(prompts))
    live: dict[str, dict[str, Any]] = {}

    def admit() -> None:
        for number, prompt in waiting:
            live[str(number)] = {"start": time.perf_counter(), "arrivals": [], "tokens": [], "end": 0.0}
            engine.add(EngineRequest(str(number), prompt, sampling))
            return

    for _ in range(concurrency):
        admit()
    while live:
        outputs = engine.step(time.perf_counter())
        now = time.perf_counter()
        for output in outputs:
            timing = live[output.request_id]
            timing["arrivals"].append(now)
            timing["tokens"].append(len(output.token_ids))
            if output.finish_reason is not None:
                timing["end"] = now
                if sum(timing["tokens"]) != max_tokens:
                    raise RuntimeError(f"request {output.request_id} has {sum(timing['tokens'])} tokens, not {max_tokens}")
                del live[output.request_id]
                yield timing
                admit()


def main() -> None:
    """Loads, says so, answers until standard input ends."""
    engine = opened(json.loads(sys.argv[1]))
    print(json.dumps({"timings": []}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"timings": list(run(engine, **json.loads(line)))}), flush=True)


if __name__ == "__main__":
    main()
