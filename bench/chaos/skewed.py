"""`python -m bench.chaos.skewed SECONDS MODULE`: runs a service that reads a wall clock so many seconds ahead, and says so first.

Only what Forebay's own code asks of time.time() is changed: gRPC's deadlines go by the same clock in C, where nothing can be replaced.
"""

import json
import runpy
import sys
import time


def main() -> None:
    """Becomes the module."""
    ahead, module = float(sys.argv[1]), sys.argv[2]
    right = time.time

    def wrong() -> float:
        caller = sys._getframe(1)  # of compiled code there is no frame: then it is who called that, who doesn't import `time`
        module = str(caller.f_globals.get("__name__", ""))
        ours = caller.f_globals.get("time") is time and (module == "__main__" or module.startswith("services."))
        return right() + (ahead if ours else 0.0)

    time.time = wrong
    print(json.dumps({"event": "clock", "now": time.time()}), flush=True)
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
