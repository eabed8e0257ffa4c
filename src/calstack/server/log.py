"""Structured logs: one JSON object a line on stderr. No prompt, no answer, no header but the request id."""

from __future__ import annotations

import datetime as dt
import logging
import sys
from typing import Any

import msgspec

from calstack.server.config import LogConfig

__all__ = ["JsonFormatter", "logging_to_stderr"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message, and whatever the call gave as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        time = dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def logging_to_stderr(config: LogConfig) -> None:
    """Send this package's and the HTTP server's logs to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name, level in (("calstack", config.level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
