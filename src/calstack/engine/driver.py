"""Couples the core to a runtime and a clock: one turn takes messages, steps the core, submits, and keeps the ledger."""

from __future__ import annotations

from collections.abc import Sequence

from calstack.clock import Clock, MonotonicClock
from calstack.devices.base import DeviceStatus
from calstack.engine.constraints import Constraints, GrammarReady
from calstack.engine.core import Core, CoreEvent
from calstack.engine.encode import EncodeCore
from calstack.engine.ledger import Ledger
from calstack.engine.result import StepResult
from calstack.errors import DeviceFatal
from calstack.runtime.plan import LaunchDone, LaunchPlan
from calstack.runtime.runtime import Runtime
from calstack.wire import EngineStats

__all__ = ["Driver"]

_LONGEST_WAIT_S = 1.0
_FROZEN_NS = 2_500_000_000  # longer than any sleep between two turns


class Driver:
    """Neither blocks nor sleeps; `wait` is the only call that does. Raises DeviceFatal when the device is lost."""

    def __init__(
        self, core: Core | EncodeCore, runtime: Runtime, *, clock: Clock | None = None, constraints: Constraints | None = None
    ) -> None:
        self.core, self.runtime = core, runtime
        self.constraints = constraints
        self.clock = clock or MonotonicClock()
        self._read_ns = self.clock.now_ns()
        self.ledger = Ledger(self._read_ns)
        self._flying: dict[int, int] = {}  # plan id -> when it was handed over, oldest first
        self._patience = (-1, 0)  # plan id of the oldest, how long it may take
        self._progress_ns = self._turn_ns = self._read_ns
        self._work = False

    def turn(self, messages: Sequence[CoreEvent] = ()) -> StepResult:
        """One step of the core with everything that has happened."""
        ends = self.runtime.collect()
        self._watch(progress=bool(ends))
        result = self.core.step(self.clock.now_ns(), [*messages, *self._grammars(), *ends])
        self._work = self._work or result.work  # a request that came and went within the turn was work too
        for completion, times in result.ended:
            self.ledger.launch(completion, times.rows, times.useful_rows)
        for end in ends:
            if isinstance(end, LaunchDone):
                self._flying.pop(end.id, None)
            else:
                self._flying.clear()
        for late in result.masks:
            self.runtime.give_mask(late)
        for plan in result.launches:
            self._submit(plan)
        for submit in result.grammars:
            if self.constraints is not None:
                self.constraints.begin(submit)
        self.runtime.clear_blocks(result.free_blocks)
        self._settle()
        self._work = result.work
        return result

    def wait(self, timeout_s: float) -> None:
        """Sleep until a launch may have ended, or a grammar is built when no launch runs; at most `timeout_s`."""
        if self.constraints is not None and self.constraints.pending and not self.runtime.in_flight:
            self.constraints.wait(min(timeout_s, _LONGEST_WAIT_S))
        else:
            self.runtime.wait(min(timeout_s, _LONGEST_WAIT_S))

    def close(self) -> None:
        """Stop building grammars and unload the calbin."""
        if self.constraints is not None:
            self.constraints.close()
        self.runtime.close()

    def _grammars(self) -> list[GrammarReady]:
        return self.constraints.take() if self.constraints is not None else []

    def next_wake_ns(self, result: StepResult) -> int | None:
        """When to turn again without an event: now if ends are at hand, else the earlier of the core's and the runtime's times."""
        if self.runtime.has_events:
            return self.clock.now_ns()
        times = [t for t in (result.wake_ns, self.runtime.wake_ns, self._hang_ns()) if t is not None]
        return min(times, default=None)

    def stats(self) -> EngineStats:
        """A snapshot for the API process."""
        core, now = self.core, self.clock.now_ns()
        counters = {**core.counters, "retries": self.runtime.retries, "padding_ns": self.ledger.padding_ns}
        return EngineStats(
            lanes_used=len(core.running),
            queued_requests=len(core.queue),
            queued_tokens=core.queue.tokens,
            running=len(core.running),
            kv_blocks_used=core.pool.held,
            kv_blocks_total=core.pool.total,
            kv_wait_ms=core.kv_wait_ns(now) / 1e6,
            dram_used_bytes=tuple(chip.used_bytes for chip in self.runtime.memory()),
            device_status=list(DeviceStatus).index(self.runtime.device.status()),
            times_s=self.ledger.seconds(),
            counters={name: int(value) for name, value in counters.items()},
        )

    def _submit(self, plan: LaunchPlan) -> None:
        self._flying[plan.id] = self.clock.now_ns()
        self.runtime.submit(plan)

    def _settle(self) -> None:
        now = self.clock.now_ns()
        self.ledger.host(self._read_ns, now, work=self._work)
        self._read_ns = now
        self.ledger.settle(min(self._flying.values(), default=now))

    def _hang_ns(self) -> int | None:
        if not self._flying:
            return None
        plan, since = next(iter(self._flying.items()))
        if self._patience[0] != plan:
            self._patience = plan, self.core.patience_ns(plan)
        return max(since, self._progress_ns) + self._patience[1] + 1

    def _watch(self, *, progress: bool) -> None:
        """A launch that does not end means the device hangs; only a new process helps. When this process itself stood still
        (nobody took a turn for long), the device may have stood still with it: its time begins anew."""
        now, hang = self.clock.now_ns(), self._hang_ns()
        frozen, self._turn_ns = now - self._turn_ns > _FROZEN_NS, now
        if progress or frozen:
            self._progress_ns = now
        elif hang is not None and now >= hang:
            waited = (now - self._progress_ns) / 1e9
            raise DeviceFatal(f"no launch ended for {waited:.1f} s", where=self.runtime.device.info().name, remedy="restart the engine")
