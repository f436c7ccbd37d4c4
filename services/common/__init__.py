"""What any process needs to be a process. No LLM word in here."""

import os

# Before gRPC loads. Its newer engine hands each message through threads of its own; where one CPU serves and computes, every switch of
# threads stops a step: without it the mesh on 2 cores made 5 to 12 % more tokens for 4 to 16 clients.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
# Nor does a stranger write our log: its core has a line for each failed TLS handshake. What concerns us comes as statuses, too.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
