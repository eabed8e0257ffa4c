"""The core as a state machine over the fake device: arrivals, cancels, faults and time in any order.

Whatever happens, each request gets exactly the ids it gets alone and exactly one end, no launch breaks a constraint (the device
raises), and blocks and lanes all come back.
"""

from __future__ import annotations

import dataclasses

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from calstack.engine.options import EngineOptions
from calstack.errors import DeviceNeedsReset, DeviceRetryable
from calstack.runtime.runtime import RuntimeOptions
from calstack.specs import Role, SamplingParams
from calstack.wire import Cancel
from tests.support.facts import small_facts, submodel
from tests.support.harness import Harness

GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = [GREEDY, SamplingParams(temperature=0.7), SamplingParams(temperature=0.9, repetition_penalty=1.3)]
PREFIXES = [(), tuple(range(20)), tuple(range(20, 50))]


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(8, 40),
        depth=st.integers(1, 3),
        chunk=st.sampled_from([1, 5, 16, 32]),
        batches=st.sampled_from([(1,), (2, 4), (1, 4, 8)]),
        queue=st.integers(1, 12),
        cache=st.sampled_from([0, 3 * 1024, 1 << 20]),
        split=st.booleans(),
        late=st.booleans(),
        itl=st.sampled_from([0.0, 3.0]),
        guess=st.booleans(),
    )
    def start(self, blocks: int, depth: int, chunk: int, batches: tuple[int, ...], queue: int, cache: int, split: bool, itl: float,
        late: bool, guess: bool,
    ) -> None:  # fmt: skip
        options = EngineOptions(
            depth=depth, prefill_chunk=chunk, max_queued_requests=queue, prefix_cache_bytes=cache, itl_target_ms=itl, min_chunk=2,
            max_restarts=1000, speculation=guess,
        )  # fmt: skip
        facts = small_facts(batches=batches, context=72, block=8)
        if split:  # long lanes fit the smallest batch only
            short = submodel(Role.DECODE, 8, 1, 40)
            facts = dataclasses.replace(facts, submodels=(*facts.submodels, short))
        self.h = Harness(facts, kv_blocks=blocks, options=options, runtime=RuntimeOptions(attempts=100, max_resets=100), late=late)
        self.count = 0

    @rule(
        prefix=st.sampled_from(PREFIXES),
        length=st.integers(1, 20),
        salt=st.integers(0, 2),
        tokens=st.integers(1, 40) | st.integers(100, 200),
        sampling=st.sampled_from(SAMPLINGS),
        extra=st.sampled_from(
            [
                {},
                {},
                {"priority": 1},
                {"key": "b"},
                {"alone": True},
                {"cache_prompt": False},
                {"grammar": "8,0"},
                {"grammar": "30,0"},
                {"overflow": "shift"},
                {"overflow": "shift", "keep": 5},
                {"overflow": "shift", "keep": 3, "grammar": "90,0"},
            ]
        ),
        stop=st.none() | st.integers(0, 8),
    )
    def arrive(
        self,
        prefix: tuple[int, ...],
        length: int,
        salt: int,
        tokens: int,
        sampling: SamplingParams,
        extra: dict[str, object],
        stop: int | None,
    ) -> None:
        name = f"r{self.count}"
        self.count += 1
        prompt = (*prefix, *((salt * 31 + i) % 97 for i in range(length)))
        message = self.h.submit(name, prompt, tokens, sampling=sampling, seed=self.count, **extra)
        expected = self.h.alone(name) if len(prompt) < self.h.core.context else []
        if stop is not None and stop < len(expected):
            message = self.h.submit(name, prompt, tokens, sampling=sampling, seed=self.count, stop_ids=(expected[stop],), **extra)
        self.h.turn(message)

    @rule(which=st.integers(0, 30))
    def cancel(self, which: int) -> None:
        self.h.turn(Cancel(request=f"r{which}"))

    @rule(ticks=st.integers(1, 30))
    def wait(self, ticks: int) -> None:
        for _ in range(ticks):
            self.h.tick()

    @rule(after=st.integers(0, 3), reset=st.booleans())
    def fault(self, after: int, reset: bool) -> None:
        if not self.h.device.faults:
            self.h.device.faults.extend([None] * after + [DeviceNeedsReset("stuck") if reset else DeviceRetryable("flaky")])

    @invariant()
    def ids_are_those_of_the_request_alone(self) -> None:
        for name, ids in self.h.ids.items():
            if ids:
                assert ids == self.h.alone(name)[: len(ids)]

    def teardown(self) -> None:
        if not hasattr(self, "h"):
            return
        self.h.device.faults.clear()
        self.h.run()
        assert set(self.h.ends) == set(self.h.submits)
        for name, end in self.h.ends.items():
            self.check_end(name, end.reason)

    def check_end(self, name: str, reason: str) -> None:
        ids, submit = self.h.ids[name], self.h.submits[name]
        if reason == "length":
            assert ids == self.h.alone(name)
        elif reason == "stop":
            expected = self.h.alone(name)
            assert ids == (
                expected[: expected.index(submit.stop_ids[0])] if submit.stop_ids and self.h.ends[name].stop_id >= 0 else expected
            )


EngineMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestEngine = EngineMachine.TestCase
