"""Runs an engine on one device for the gateways that hold a lease."""

import os

# Before torch loads its OpenMP: threads that wait must sleep. By default they spin, and where a step shares its cores with anything
# else (the gateway on a laptop, the gRPC threads of this process) a spinning thread keeps the one it waits for from running: 2 threads
# on 2 cores beside 3 busy processes took 1 to 3 s for a step of 0.08 s.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
