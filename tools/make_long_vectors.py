"""Logits of the tiny qwen3 at positions deep in a context of 40,960, by transformers in f32, run in chunks.

/tmp/reference/bin/python tools/make_long_vectors.py    (environment: tools/make_reference_vectors.py)
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
SOURCE, TARGET = ROOT / "tests/data/tiny-qwen3", ROOT / "tests/golden/models/tiny-qwen3-long.safetensors"
LENGTH, CHUNK = 40_960, 512
AT = (511, 8191, 8192, 32_768, 40_959)


def main() -> None:
    """Write the vectors."""
    with tempfile.TemporaryDirectory() as folder:
        for file in SOURCE.iterdir():
            (Path(folder) / file.name).write_bytes(file.read_bytes())
        config = json.loads((SOURCE / "config.json").read_text()) | {"max_position_embeddings": LENGTH}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    ids = np.random.default_rng(12).integers(4, 320, LENGTH)
    cache = None
    rows: dict[int, np.ndarray] = {}
    for start in range(0, LENGTH, CHUNK):
        with torch.no_grad():
            out = model(input_ids=torch.from_numpy(ids[None, start : start + CHUNK]), cache=cache, use_cache=True)
        cache = out.cache
        rows |= {at: out.logits[0, at - start].numpy() for at in AT if start <= at < start + CHUNK}
    save_file({"ids": ids, "at": np.array(AT), "logits": np.stack([rows[at] for at in AT])}, TARGET)


if __name__ == "__main__":
    main()
