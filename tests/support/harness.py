"""Drives core and runtime over the fake device on a virtual clock, and checks what must always hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from calstack.clock import VirtualClock
from calstack.engine.core import Core, CoreEvent
from calstack.engine.driver import Driver
from calstack.engine.options import EngineOptions
from calstack.runtime.facts import CalbinFacts
from calstack.runtime.runtime import Runtime, RuntimeOptions
from calstack.specs import SamplingParams
from calstack.wire import Finish, Submit, TokenLogprob
from tests.support.constraints import AtOnce, Ladder
from tests.support.fake_device import FakeDevice, alone

GREEDY = SamplingParams(temperature=0.0)


class Harness:
    def __init__(
        self,
        facts: CalbinFacts,
        *,
        kv_blocks: int = 64,
        options: EngineOptions | None = None,
        runtime: RuntimeOptions | None = None,
        late: bool = True,
    ) -> None:
        self.facts = facts
        self.clock = VirtualClock(1_000_000)
        self.device = FakeDevice(facts, self.clock, late=late)
        self.runtime = Runtime(self.device, Path("none"), facts, kv_blocks=kv_blocks, options=runtime, clock=self.clock)
        options = dataclasses.replace(options or EngineOptions(), grammars=True, late_masks=self.device.late)
        self.core = Core(facts, kv_blocks=kv_blocks, options=options)
        self.driver = Driver(self.core, self.runtime, clock=self.clock, constraints=AtOnce(facts.vocab))
        self.submits: dict[str, Submit] = {}
        self.ids: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        self.ends: dict[str, Finish] = {}

    def submit(self, name: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 8, **more: object) -> Submit:
        sampling = more.pop("sampling", GREEDY)
        message = Submit(request=name, prompt=prompt, max_tokens=max_tokens, sampling=sampling, seed=more.pop("seed", 7), **more)  # type: ignore[arg-type]
        self.submits[name] = message
        self.ids[name] = list(message.output)
        return message

    def turn(self, *messages: CoreEvent) -> None:
        result = self.driver.turn(messages)
        for out in result.tokens:
            assert out.request not in self.ends, f"{out.request}: output after its end"
            self.ids[out.request].extend(out.ids)
            self.logprobs.setdefault(out.request, []).extend(out.logprobs)
            if out.finish is not None:
                self.ends[out.request] = out.finish

    def tick(self, ns: int = 1_000_000) -> None:
        self.clock.advance(ns)
        self.turn()

    def run(self, *messages: CoreEvent, limit: int = 20_000, tick_ns: int = 1_000_000) -> None:
        """Until idle."""
        self.turn(*messages)
        for _ in range(limit):
            if self.core.idle and not self.runtime.has_events:
                self.check_idle()
                return
            self.tick(tick_ns)
        raise AssertionError("the engine did not become idle")

    def check_idle(self) -> None:
        self.turn()
        assert self.core.pool.leaks() == 0
        assert self.core.counters["leaks"] == 0
        assert not self.core.running
        assert len(self.core.queue) == 0
        assert self.core.queue.tokens == 0
        assert self.runtime.in_flight == 0

    def alone(self, name: str) -> list[int]:
        """What the request gets when it runs to its limit with nobody else."""
        s = self.submits[name]
        shift = (self.core.context, min(s.keep, len(s.prompt))) if s.overflow == "shift" else None
        limit = s.max_tokens if shift else min(s.max_tokens, self.core.context - len(s.prompt))
        grammar = Ladder(self.facts.vocab, s.grammar) if s.grammar else None
        return alone(s.prompt, s.sampling, s.seed, s.choice, limit, self.facts.vocab, grammar, shift)
