"""Benchmarks: each prints JSON lines and is run by a make target."""
