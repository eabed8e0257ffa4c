"""What every route needs, gathered once at start."""

from __future__ import annotations

import concurrent.futures
import dataclasses

from calstack.errors import UnavailableError
from calstack.server.access import Access
from calstack.server.admission import Admission
from calstack.server.config import ServeConfig
from calstack.server.journal import Journal
from calstack.server.metrics import Metrics
from calstack.server.model import ServedModel
from calstack.server.supervisor import EngineState, Supervisor
from calstack.server.traces import Traces
from calstack.wire import CalbinInfo

__all__ = ["Context"]


@dataclasses.dataclass(slots=True, kw_only=True)
class Context:
    """The parts of a running server. Only `draining` changes."""

    config: ServeConfig
    model: ServedModel
    journal: Journal
    supervisor: Supervisor
    admission: Admission
    metrics: Metrics
    pool: concurrent.futures.ThreadPoolExecutor
    """Threads for templates and tokenising."""
    grammar_pool: concurrent.futures.ThreadPoolExecutor
    """Threads that wait for constraints to compile, so that nobody else waits behind them."""
    access: Access
    traces: Traces | None = None
    draining: bool = False

    def ready(self) -> CalbinInfo:
        """What the engine serves.

        Raises:
            UnavailableError: while loading, draining, or when the engine is down.
        """
        if self.draining:
            raise UnavailableError("the server is shutting down", retry_after=5.0)
        state, info = self.supervisor.state, self.supervisor.info
        if state is EngineState.READY and info is not None:
            return info
        if state is EngineState.FAILED:
            raise UnavailableError("the engine is down", retry_after=30.0)
        raise UnavailableError("Loading model" if info is None else "the engine starts again")
