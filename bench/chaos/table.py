"""Every row, in order."""

from bench.chaos import gateway_rows, scheduler_rows, store_rows, worker_rows

ROWS = tuple(sorted((*worker_rows.ROWS, *scheduler_rows.ROWS, *store_rows.ROWS, *gateway_rows.ROWS), key=lambda row: row.name))
