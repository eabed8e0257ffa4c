"""llama.cpp through its low-level binding, timed by llama.cpp's own performance counters.

The high-level Python class adds per-token work that is not llama.cpp's; one `llama_decode` per batch and the library's own
`t_p_eval_ms` / `t_eval_ms` give the figures its own bench program gives.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp

from calstack.bench.subject import prompt_ids
from calstack.errors import SourceError

__all__ = ["LlamaCpp"]


class LlamaCpp:
    """A llama.cpp context with `lanes` sequences over one cache (flash attention auto, f16 KV: its defaults)."""

    def __init__(self, model: Path, *, threads: int, context: int, lanes: int) -> None:
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        self._model: Any = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
        if not self._model:
            raise SourceError("llama.cpp cannot load the model", where=str(model))
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context = self._open(threads, context, lanes)
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)

    @property
    def name(self) -> str:
        return f"llama.cpp ({llama_cpp.__version__})"

    def _open(self, threads: int, context: int, lanes: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context * lanes
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_seq_max = lanes
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = False
        if hasattr(params, "kv_unified"):
            params.kv_unified = True
        return llama_cpp.llama_init_from_model(self._model, params)

    def prefill(self, tokens: int) -> float:
        self._clear()
        return self._feed(prompt_ids(tokens, self._vocab), seq=0)

    def decode(self, depth: int, batch: int, steps: int) -> float:
        self._clear()
        for seq in range(batch):
            self._feed(prompt_ids(depth, self._vocab, salt=seq), seq=seq)
        llama_cpp.llama_perf_context_reset(self._context)
        for step in range(steps):
            self._set([(1 + seq, depth + step, seq, True) for seq in range(batch)])
            self._run()
        data = llama_cpp.llama_perf_context(self._context)
        # a batch of several sequences counts as prompt work in its counters
        return float(data.t_eval_ms if batch == 1 else data.t_p_eval_ms) / 1e3

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        llama_cpp.llama_perf_context_reset(self._context)

    def _feed(self, ids: list[int], seq: int) -> float:
        llama_cpp.llama_perf_context_reset(self._context)
        for start in range(0, len(ids), 2048):
            part = ids[start : start + 2048]
            self._set([(token, start + i, seq, start + i == len(ids) - 1) for i, token in enumerate(part)])
            self._run()
        data = llama_cpp.llama_perf_context(self._context)
        return float(data.t_p_eval_ms + data.t_eval_ms) / 1e3

    def _set(self, rows: list[tuple[int, int, int, bool]]) -> None:
        b = self._batch
        b.n_tokens = len(rows)
        for i, (token, pos, seq, logits) in enumerate(rows):
            b.token[i], b.pos[i] = token, pos
            b.n_seq_id[i] = 1
            b.seq_id[i][0] = seq
            b.logits[i] = int(logits)

    def _run(self) -> None:
        code = llama_cpp.llama_decode(self._context, self._batch)
        if code:
            raise SourceError(f"llama_decode failed with {code}", where="llama.cpp")
        llama_cpp.llama_synchronize(self._context)
