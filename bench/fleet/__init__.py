"""The fleet on a virtual clock: the real policy on simulated nodes, driven by published traces."""
