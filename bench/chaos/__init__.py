"""Faults in a mesh of real processes under load, and what became of the requests (`make chaos`). Only the model runner is replaced."""
