"""`python -m services.worker.engine --model PATH 1 2 3`: continues a prompt of token ids, greedily, and prints the ids that follow."""

import argparse
import time

from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine, EngineRequest, SamplingParams

parser = argparse.ArgumentParser(prog="python -m services.worker.engine", description=__doc__)
parser.add_argument("--model", required=True, help="GGUF file or Hugging Face folder")
parser.add_argument("--max-tokens", type=int, default=16)
parser.add_argument("token_ids", type=int, nargs="+")
arguments = parser.parse_args()

engine = Engine.from_path(arguments.model, EngineConfig(num_blocks=256))
engine.add(EngineRequest("0", arguments.token_ids, SamplingParams(max_tokens=arguments.max_tokens, temperature=0)))
while engine.has_work:
    for output in engine.step(time.monotonic()):
        print(*output.token_ids, end=" ", flush=True)
print()
