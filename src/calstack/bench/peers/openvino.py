"""OpenVINO GenAI on a GGUF file or an exported directory: both of its pipelines, the faster one counts in every run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino_genai as genai

from calstack.bench.subject import prompt_ids

__all__ = ["OpenVino"]


class OpenVino:
    """LLMPipeline and ContinuousBatchingPipeline with OpenVINO's own defaults for this CPU."""

    def __init__(self, model: Path, *, threads: int, context: int, lanes: int) -> None:
        self._lanes = lanes
        self._plain: Any = genai.LLMPipeline(str(model), "CPU", INFERENCE_NUM_THREADS=threads)
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = max(1, -(-context * lanes * 64 // 2**20))
        scheduler.max_num_batched_tokens = 512
        scheduler.enable_prefix_caching = False
        self._batched: Any = genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})
        # a vocabulary floor every supported model has: ids only need to be valid and the same for every subject
        self._vocab = 32000
        self._next = 0

    @property
    def name(self) -> str:
        return f"OpenVINO GenAI ({genai.__version__})"

    def prefill(self, tokens: int) -> float:
        return min(self._plain_times(tokens, 1)[0], self._batched_times(tokens, 1, 1)[0])

    def decode(self, depth: int, batch: int, steps: int) -> float:
        batched = self._batched_times(depth, batch, steps)[1]
        return batched if batch > 1 else min(batched, self._plain_times(depth, steps)[1])

    def close(self) -> None:
        del self._plain, self._batched

    def _plain_times(self, depth: int, steps: int) -> tuple[float, float]:
        """Seconds to the first token and of the `steps` after it, by its own metrics."""
        ids = self._fresh_ids(depth)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        metrics = self._plain.generate(inputs, self._config(steps + 1)).perf_metrics
        return metrics.get_ttft().mean / 1e3, metrics.get_tpot().mean * steps / 1e3

    def _batched_times(self, depth: int, batch: int, steps: int) -> tuple[float, float]:
        """Seconds until every sequence has its first token, and of the `steps` steps after that."""
        handles = []
        for _ in range(batch):
            ids = self._fresh_ids(depth)
            handles.append(self._batched.add_request(self._next, ov.Tensor(ids), self._config(steps + 8)))
        start = time.perf_counter()
        waiting = set(range(batch))
        while waiting:
            self._batched.step()
            waiting -= {i for i in waiting if handles[i].can_read() and handles[i].read()}
        first = time.perf_counter()
        for _ in range(steps):
            self._batched.step()
        end = time.perf_counter()
        while self._batched.has_non_finished_requests():
            self._batched.step()
        return first - start, end - first

    def _fresh_ids(self, count: int) -> npt.NDArray[np.int64]:
        """Another prompt each time: LLMPipeline keeps the cache of the last one and would reuse it."""
        self._next += 1
        return np.asarray([prompt_ids(count, self._vocab, salt=7919 * self._next)], dtype=np.int64)

    def _config(self, tokens: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.min_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        return config
