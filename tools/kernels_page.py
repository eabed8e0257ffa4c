"""Write docs/reference/kernels.md: every kernel with its error against f64, what its tests cover, the bytes it moves and what fusing gains.

Usage: python tools/kernels_page.py     (a quiet machine; half a minute)

Errors are of the fastest instruction set, which has the bits of the scalar reference, so they are every instruction set's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.native import attention_support, linear_support  # noqa: E402

from calstack.native import _core  # noqa: E402

# The tests' own cases and f64 references; their module is not typed.
attention_cases: Any = attention_support
linear_cases: Any = linear_support
PAGE = ROOT / "docs" / "reference" / "kernels.md"
kernels = _core.kernels
ISA = kernels.isas()[-1]
ROWS, K, N = 512, 576, 1536
HEAD = f"""# Kernels

Written by `python tools/kernels_page.py` on {ISA}. Errors are the largest |ours - f64| over the largest |f64|, with the kernel's own
inputs (packed weights, stored keys and values) taken as exact. Tests hold every instruction set to the scalar reference bit for bit.
The last column is the time of separate steps over the time of the fused kernel, {ROWS} rows, one thread; steps that calstack has no
kernel for are numpy's.

| kernel | error | tested over | bytes it moves | gain of fusing |
|---|---|---|---|---|"""


def best(run: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs."""
    times = []
    for _ in range(12):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def error(ours: Any, exact: Any) -> str:
    """Largest difference over the largest value."""
    return f"{float(np.abs(ours - exact).max() / np.abs(exact).max()):.1e}"


def silu(x: Any) -> Any:
    return x / (1 + np.exp(np.minimum(-x, 80)))


def linear_rows() -> list[tuple[str, ...]]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((ROWS, K)).astype(np.float32)
    norm = rng.uniform(0.5, 2.0, K).astype(np.float32)
    found: list[tuple[str, ...]] = []
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * norm
    found.append(("norm_rows", error(kernels.norm_rows(ISA, x, norm, 1e-5), exact), "1 to 1536 values, every tail", "8 n a row", ""))
    q = kernels.quant_rows(ISA, x, norm, 1e-5, 32)
    back = (q[0].reshape(ROWS, -1, 32) * q[1][:, :, None]).reshape(ROWS, K)
    fused = best(lambda: kernels.quant_rows(ISA, x, norm, 1e-5, 32))
    apart = best(lambda: kernels.quant_rows(ISA, kernels.norm_rows(ISA, x, norm, 1e-5), None, 0.0, 32))
    covers = "1 to 9 rows, groups of 32, 64, 128, any magnitude"
    found.append(("quant_rows with norm", error(back, exact), covers, "5.4 k a row", f"{apart / fused:.2f}x of norm, then quantise"))
    for fmt, minimum in (("w4a8", True), ("w4a8", False), ("w8a8", False)):
        found.append(quantised_row(fmt, minimum=minimum, q=q, x=back))
    for fmt, minimum in (("w4a16", True), ("bf16", False), ("f16", False), ("f32", False)):
        w = linear_cases.random_weight(rng, fmt, N, K, minimum=minimum)
        out = np.zeros((ROWS, N), np.float32)
        kernels.linear_f(ISA, w.native(), x, out)
        covers = "1 to 40 rows, 1 to 200 outputs, every epilogue"
        found.append((f"linear_f {fmt}", error(out, x.astype(np.float64) @ w.f64().T), covers, "weights + 4 (n + k) a row", ""))
    return found


def quantised_row(fmt: str, *, minimum: bool, q: Any, x: Any) -> tuple[str, ...]:
    rng = np.random.default_rng(2)
    w = linear_cases.random_weight(rng, fmt, N, K, minimum=minimum)
    native = w.native()
    out, stream = np.zeros((ROWS, N), np.float32), rng.standard_normal((ROWS, N)).astype(np.float32)
    half = np.zeros((ROWS, N // 2), np.float32)
    kernels.linear_q(ISA, native, *q, out)
    wrong = error(out, x.astype(np.float64) @ w.f64().T)

    def residual_apart() -> None:
        kernels.linear_q(ISA, native, *q, out)
        np.add(stream, out, out=stream)

    def gated_apart() -> None:
        kernels.linear_q(ISA, native, *q, out)
        np.multiply(silu(out[:, : N // 2]), out[:, N // 2 :], out=half)

    residual = best(residual_apart) / best(lambda: kernels.linear_q(ISA, native, *q, stream, epilogue="residual"))
    gated = best(gated_apart) / best(lambda: kernels.linear_q(ISA, native, *q, half, epilogue="gated"))
    name = f"linear_q {fmt}" + (" with minimum" if minimum else "")
    covers = "1 to 40 rows, 1 to 200 outputs, groups of 32, 64, 128, every epilogue"
    return name, wrong, covers, "weights + k + 12 k / group + 4 n a row", f"residual {residual:.2f}x, gate {gated:.2f}x"


def attention_rows() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for kv in ("f32", "bf16", "bf16_v8", "i8"):
        case = attention_cases.Case(past=300, rows=40, kv=kv)
        lane, qkv = attention_cases.filled(case, np.random.default_rng(3))
        out = kernels.attention(ISA, lane.cache, qkv, 0, attention_cases.positions_of(case))
        covers = "1 to 600 positions, head_dim 8 to 256, groups of 1 to 8 heads, windows, soft cap"
        bytes_ = f"{sum(size * case.dim + 4 * (size == 1) for size in attention_cases.SIZES[kv])} a position and KV head (head_dim 64)"
        found.append(
            (
                f"attention, {kv} cache",
                error(out, attention_cases.attention_f64(case, lane, qkv)),
                covers,
                bytes_,
                "no scores or expanded heads in memory",
            )
        )
    return found


def other_rows() -> list[tuple[str, ...]]:
    rng = np.random.default_rng(4)
    z = rng.standard_normal((ROWS, 128)).astype(np.float32) * np.float32(3)
    weights, chosen = kernels.moe_route(ISA, z, 8, True)
    p = np.exp(np.take_along_axis(z.astype(np.float64), chosen.astype(np.int64), 1))
    route = error(weights, p / p.sum(1, keepdims=True))
    parts, share = rng.standard_normal((8, 2048)).astype(np.float32), rng.random(8).astype(np.float32)
    out = np.zeros(2048, np.float32)
    kernels.moe_combine(ISA, share, parts, out)
    freq = (1.0 / 10000 ** (np.arange(32) / 32)).astype(np.float32)
    at = np.arange(4096, dtype=np.int32)
    angle = (at[:, None].astype(np.float32) * freq).astype(np.float64)
    rope = error(kernels.rope_table(ISA, freq, at), np.concatenate([np.cos(angle), np.sin(angle)], 1))
    return [
        ("rope_table", rope, "positions to 1,000,000", "4 dim a row", "once a launch for all layers"),
        ("qk_norm_rope_kv", "as norm_rows and rope_table", "1 to 40 rows, head_dim 8 to 256, every KV dtype", "8 (q + k + v) a row", ""),
        ("moe_route", route, "1 to 200 experts, 1 to 24 chosen, ties", "4 experts a row", ""),
        ("moe_combine", error(out, share.astype(np.float64) @ parts), "1 to 2048 values, every tail", "4 n (chosen + 2) a row", ""),
        ("embed_rows", "exact", "every format", "a packed row and 4 k", ""),
        ("sample", "exact choice; log-probabilities 1e-6", "greedy, top-k, top-p, min-p, penalties, bias, masks", "4 vocabulary a row", ""),
    ]


def main() -> None:
    rows = [*linear_rows(), *attention_rows(), *other_rows()]
    PAGE.write_text("\n".join([HEAD, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n")


if __name__ == "__main__":
    main()
