"""The CPU backend in C++, one call per step. Compiled by tools/build_kernels.py; without a library the torch path serves."""
