"""The engine's options: one frozen value, set at start."""

from __future__ import annotations

import dataclasses

__all__ = ["EngineOptions"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Bounds and targets of the engine core."""

    max_lanes: int = 0  # requests that run at once; 0 = the largest decode batch
    depth: int = 2  # launches in flight
    grammars: bool = False  # somebody builds the grammars of requests
    late_masks: bool = False  # the device takes masks after submit: grammars run ahead as others do
    speculation: bool = False  # guess ids by prompt lookup and check them in one launch
    max_guesses: int = 7  # of a request in a launch
    adapt_guesses: bool = True  # check only as many as pay; False = all there are
    prefill_chunk: int = 512  # most prompt tokens of one request in a launch
    score_chunk: int = 32  # as prefill_chunk, of a request whose prompt is scored: all its logits come back
    min_chunk: int = 16  # the inter-token target never cuts a launch's prompt tokens below this
    itl_target_ms: float = 50.0  # time between tokens that prefill leaves to running streams; 0 = no target
    max_queued_requests: int = 256
    max_queued_tokens: int = 1 << 20  # prompt tokens of queued requests
    kv_wait_timeout_s: float = 120.0  # the head of the queue waits this long for blocks, then ends with an error; 0 = for ever
    prefix_cache: bool = True
    prefix_cache_bytes: int = 256 << 20  # blocks that only the cache holds
    max_restarts: int = 3  # of one request by device resets
    max_top_logprobs: int = 20
    launch_timeout_s: float = 60.0  # a launch that takes longer than this means a hang, until one like it was measured
    hang_s: float = 1.0  # afterwards: longer than this,
    hang_factor: float = 10.0  # and longer than so many times what it should take
