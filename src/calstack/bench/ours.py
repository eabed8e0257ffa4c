"""Our side of a benchmark: a calbin through the device alone, through the engine, or through HTTP."""

from __future__ import annotations

import time
from pathlib import Path

from calstack import api
from calstack.bench.subject import decode_window, prompt_ids
from calstack.calbin.manifest import Manifest

__all__ = ["DeviceSubject", "EngineSubject"]


class DeviceSubject:
    """The calbin on a device, no engine: launches back to back, two in flight, ids passed on the device."""

    def __init__(self, calbin: Path, *, device: str, isa: str, threads: int, lanes: int, positions: int, completion: str = "event") -> None:
        self._session = api.open_direct(
            calbin, device=device, isa=isa, threads=threads, lanes=lanes, positions=positions, completion=completion
        )
        self._vocab = self._session.manifest.model.vocab
        self._filled: list[int] = [0] * lanes

    @property
    def name(self) -> str:
        info = self._session.device.info()
        return f"calstack ({info.name}, {info.isa}, {info.threads} threads)"

    @property
    def manifest(self) -> Manifest:
        """The calbin's manifest."""
        return self._session.manifest

    @property
    def vocab(self) -> int:
        """Rows of the logits."""
        return self._vocab

    @property
    def threads(self) -> int:
        """Worker threads in use."""
        return self._session.device.info().threads

    @property
    def isa(self) -> str:
        """Instruction set in use."""
        return self._session.device.info().isa

    @property
    def kv_dtype(self) -> str:
        """Element type of the KV cache."""
        return self._session.manifest.kv.dtype.value

    def prefill(self, tokens: int) -> float:
        self._session.rewind(0)
        self._filled[0] = 0
        ids = prompt_ids(tokens, self._vocab)
        start = time.perf_counter()
        self._session.prefill(ids)
        return time.perf_counter() - start

    def decode(self, depth: int, batch: int, steps: int) -> float:
        for lane in range(batch):
            self._fill(lane, depth)
        first = [1 + lane for lane in range(batch)]
        start = time.perf_counter()
        self._session.decode(first, steps)
        elapsed = time.perf_counter() - start
        for lane in range(batch):
            self._session.rewind(lane, depth)
        return elapsed

    def close(self) -> None:
        self._session.close()
        self._session.device.close()

    def _fill(self, lane: int, depth: int) -> None:
        """Prompt positions stay valid between repeats, so they are computed once per depth."""
        if self._filled[lane] == depth:
            return
        self._session.rewind(lane)
        self._session.prefill(prompt_ids(depth, self._vocab, salt=lane), lane=lane)
        self._filled[lane] = depth


class EngineSubject:
    """The calbin through the engine core in this process: scheduler, KV manager and sampling, no HTTP.

    Prompts differ from run to run, so no prefix is ever reused.
    """

    def __init__(self, calbin: Path, *, device: str, isa: str, threads: int, completion: str = "event") -> None:
        self._llm = api.load(calbin, device=device, open_options=api.OpenOptions(isa=isa, threads=threads, completion=completion))
        self._vocab = self._llm.driver.core.facts.vocab
        self._salt = 0

    @property
    def name(self) -> str:
        return "calstack through the engine"

    def prefill(self, tokens: int) -> float:
        start = time.perf_counter()
        return self._arrivals([tokens], 1)[0][0] - start

    def decode(self, depth: int, batch: int, steps: int) -> float:
        return decode_window(self._arrivals([depth] * batch, steps + (32 if batch > 1 else 1)), steps)

    def close(self) -> None:
        self._llm.close()

    def _arrivals(self, prompts: list[int], tokens: int) -> list[list[float]]:
        """When each token of each stream arrived; all streams start together and are read in turn."""
        streams = []
        for count in prompts:
            self._salt += 1
            ids = prompt_ids(count, self._vocab, salt=1000 * self._salt)
            streams.append(self._llm.generate(ids, max_tokens=tokens, ignore_eos=True))
        arrivals: list[list[float]] = [[] for _ in streams]
        running = set(range(len(streams)))
        while running:
            for i in sorted(running):
                event = next(streams[i], None)
                if event is None:
                    running.discard(i)
                else:
                    arrivals[i] += [time.perf_counter()] * len(event.ids)
        return arrivals
