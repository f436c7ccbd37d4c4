"""Who goes next, and where. Pure: no clock, no Redis, no torch; the simulator runs the same functions."""
