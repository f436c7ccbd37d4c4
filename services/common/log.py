"""Structured logs on standard error: JSON lines, or coloured text on a terminal. Never prompts, tokens or keys."""

import logging
import sys

import structlog
from structlog.tracebacks import ExceptionDictTransformer

from services.common import tracing
from services.common.log_lines import LineHandler

Logger = structlog.stdlib.BoundLogger


def setup(service: str, level: str = "info", json: bool | None = None) -> None:
    """Configures logging for this process, the standard library's records included. JSON unless stderr is a terminal."""
    as_json = not sys.stderr.isatty() if json is None else json
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_trace,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor
    # Both ways without the frames' variables, which are prompts and tokens; structlog shows them unless told otherwise.
    if as_json:
        shared.append(structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)))
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = _handler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.contextvars.bind_contextvars(service=service)


def _handler() -> logging.Handler:
    """Of standard error, whatever has taken its place."""
    try:
        return LineHandler(sys.stderr.fileno())
    except (OSError, ValueError):  # it is no file
        return logging.StreamHandler(sys.stderr)


def _add_trace(_: object, __: str, entry: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Whose trace the line belongs to, while there is one."""
    if span := tracing.current():
        entry["trace_id"], entry["span_id"] = span.ids
    return entry


def get(name: str) -> Logger:
    """A logger by module name."""
    logger: Logger = structlog.stdlib.get_logger(name)
    return logger
