"""Every row, in order."""

from bench.chaos import worker_rows

ROWS = tuple(sorted((*worker_rows.ROWS,), key=lambda row: row.name))
