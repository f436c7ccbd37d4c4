"""`python -m bench.fleet`: see compare.py, which is a module of its own because other processes import it."""

from bench.fleet.compare import main

main()
