"""Router and combination of experts: every instruction set against the scalar reference, the reference against numpy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from calstack import api
from calstack.calbin.reader import open_calbin
from calstack.devices.base import LaneInput, Launch, LogitRows, OpenOptions
from calstack.devices.registry import open_device
from calstack.specs import QuantSpec, WeightFormat
from tests.native.linear_support import ISAS, kernels, same_bits
from tests.support.tiny import DATA

pytestmark = pytest.mark.native

TOKENS = [int(t) for t in np.random.default_rng(11).integers(4, 300, 200)]


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=80, deadline=None)
@given(experts=st.integers(1, 200), top_k=st.integers(1, 24), renormalise=st.booleans(), ties=st.booleans(), seed=st.integers(0, 9999))
def test_routes_are_bit_equal_with_ties_too(isa, experts, top_k, renormalise, ties, seed):
    rng = np.random.default_rng(seed)
    top_k = min(top_k, experts)
    z = rng.standard_normal((3, experts)).astype(np.float32) * np.float32(4)
    if ties:
        z = np.round(z)
    ours, theirs = kernels.moe_route(isa, z, top_k, renormalise), kernels.moe_route("reference", z, top_k, renormalise)
    assert np.array_equal(ours[1], theirs[1])
    same_bits(ours[0], theirs[0])


@pytest.mark.parametrize("isa", ["reference", *ISAS])
def test_of_equal_experts_the_lower_is_chosen_and_comes_first(isa):
    z = np.zeros((1, 40), np.float32)
    z[0, [7, 21, 30]] = 2.0
    assert kernels.moe_route(isa, z, 5, False)[1].tolist() == [[7, 21, 30, 0, 1]]


@pytest.mark.parametrize("renormalise", [False, True])
def test_weights_are_those_of_a_softmax(renormalise):
    z = np.random.default_rng(3).standard_normal((20, 128)).astype(np.float32) * np.float32(3)
    weights, chosen = kernels.moe_route("reference", z, 8, renormalise)
    p = np.exp(z.astype(np.float64) - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    assert np.array_equal(chosen, np.argsort(-p, axis=1, kind="stable")[:, :8])
    want = np.take_along_axis(p, chosen.astype(np.int64), axis=1)
    want = want / want.sum(axis=1, keepdims=True) if renormalise else want
    assert np.abs(weights - want).max() < 1e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 100, 2048])
def test_combinations_are_bit_equal_on_every_tail(isa, n):
    rng = np.random.default_rng(n)
    weights, parts = rng.random(8).astype(np.float32), rng.standard_normal((8, n)).astype(np.float32)
    out = rng.standard_normal(n).astype(np.float32)
    ours, theirs = out.copy(), out.copy()
    kernels.moe_combine(isa, weights, parts, ours)
    kernels.moe_combine("reference", weights, parts, theirs)
    same_bits(ours, theirs)
    assert np.abs(theirs - (out + weights.astype(np.float64) @ parts)).max() < 1e-5


@pytest.fixture(scope="module", params=[WeightFormat.W8A8, WeightFormat.W4A8, WeightFormat.BF16], ids=str)
def calbin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = api.CompileOptions(quant=QuantSpec(default=request.param), batches=(1, 4), quality=False)
    return api.compile_model(DATA / "tiny-qwen3-moe", tmp_path_factory.mktemp("moe") / "m.calbin", options=options)


def logits(calbin: Path, spans: list[tuple[int, int]], *, isa: str = "", threads: int = 2, mates: int = 0) -> bytes:
    """Logits of TOKENS[start:end] of every span, one launch each; a span of one token is a decode launch."""
    device = open_device("cpu", OpenOptions(isa=isa, threads=threads, strict=True))
    submodels = open_calbin(calbin).manifest.submodels
    prefill = next(s.key for s in submodels if s.role == "prefill")
    decode = min((s for s in submodels if s.role == "decode" and s.batch > mates), key=lambda s: s.batch).key
    handle, rows = device.load(calbin, kv_blocks=16), b""
    for start, end in spans:
        single = end - start == 1
        lane = LaneInput(past_len=start, cur_len=end - start, blocks=(3, 1), tokens=TOKENS[start:end], logits=LogitRows.ALL)
        sizes = [1 if single else 30 + i for i in range(mates)]
        others = [LaneInput(past_len=0, cur_len=n, blocks=(4 + i,), tokens=TOKENS[i : i + n]) for i, n in enumerate(sizes)]
        done = device.wait(device.submit(Launch(handle, decode if single else prefill, (*others, lane))), 60)
        assert done is not None
        assert done.error is None
        found = done.lanes[-1].logits
        assert found is not None
        rows += found.tobytes()
    device.close()
    return rows


def test_a_rows_bits_depend_on_no_row_that_shares_its_experts(calbin: Path) -> None:
    whole = logits(calbin, [(0, 100)])
    assert logits(calbin, [(0, 37), (37, 38), (38, 100)]) == whole
    assert logits(calbin, [(0, 100)], mates=3) == whole
    assert logits(calbin, [(0, 90), *((i, i + 1) for i in range(90, 100))]) == whole
    assert logits(calbin, [(0, 90), *((i, i + 1) for i in range(90, 100))], mates=3) == whole
    assert logits(calbin, [(0, 100)], threads=1) == whole


@pytest.mark.parametrize("isa", ["reference", *ISAS])
def test_the_whole_model_has_the_same_bits_on_every_instruction_set(calbin: Path, isa: str) -> None:
    assert logits(calbin, [(0, 100)], isa=isa) == logits(calbin, [(0, 60), (60, 100)])


def one_expert_each(dense: Path, out: Path) -> Path:
    """The dense model as a mixture whose experts are all its MLP, one of them chosen: whoever is, the sum is that of the MLP."""
    config = json.loads((dense / "config.json").read_text())
    config |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 1}
    config |= {"moe_intermediate_size": config["intermediate_size"], "norm_topk_prob": True, "decoder_sparse_step": 1}
    tensors, rng = {}, np.random.default_rng(5)
    for name, value in load_file(dense / "model.safetensors").items():
        before, mlp, after = name.partition(".mlp.")
        for expert in range(4) if mlp else ():
            tensors[f"{before}.mlp.experts.{expert}.{after}"] = value
        if not mlp:
            tensors[name] = value
    for layer in range(config["num_hidden_layers"]):
        router = rng.standard_normal((4, config["hidden_size"])).astype(np.float32)
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = router
    shutil.copytree(dense, out)
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.mark.parametrize("weights", [WeightFormat.W4A8, WeightFormat.W8A8, WeightFormat.F32], ids=str)
def test_an_experts_arithmetic_is_that_of_a_dense_mlp_bit_for_bit(tmp_path: Path, weights: WeightFormat) -> None:
    dense = DATA / "tiny-qwen3"
    options = api.CompileOptions(quant=QuantSpec(default=weights), batches=(1,), quality=False)
    sources = {"dense": dense, "mixture": one_expert_each(dense, tmp_path / "mixture")}
    found = {name: api.compile_model(source, tmp_path / f"{name}.calbin", options=options) for name, source in sources.items()}
    spans = [(0, 97), (97, 98), (98, 128)]
    assert logits(found["mixture"], spans) == logits(found["dense"], spans)
