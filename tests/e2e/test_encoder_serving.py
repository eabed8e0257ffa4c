"""`calstack serve` of encoders, with processes of their own: vectors and scores are the device's, bit for bit, whoever asks beside."""

from __future__ import annotations

import base64
import concurrent.futures
import math
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from calstack.calbin.reader import open_calbin
from calstack.devices.base import LaneInput, LaneOutput, Launch, OpenOptions
from calstack.devices.registry import open_device
from calstack.graph.encode import run_encoder
from calstack.text.tokenizer import Tokenizer
from tests.support.encoders import bundle_of, cross_encoder, encoder_calbin, sentence_encoder
from tests.support.served import Served, served

pytestmark = [pytest.mark.e2e, pytest.mark.native]

TEXTS = ["hello world", "", "a", "the quick brown fox", "<|im_end|> is no end", "x y z " * 3]
QUERY, DOCUMENTS = "what is it?", ["it is this", "no", "something else is here", "it"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


@pytest.fixture(scope="module")
def embedder(base: Path) -> Iterator[Served]:
    calbin = encoder_calbin(sentence_encoder(base / "st"), base / "st.calbin")
    with served(calbin, base / "st.log") as running:
        yield running


@pytest.fixture(scope="module")
def ranker(base: Path) -> Iterator[Served]:
    calbin = encoder_calbin(cross_encoder(base / "ce"), base / "ce.calbin")
    with served(calbin, base / "ce.log") as running:
        yield running


def rows_of(calbin: Path, texts: Sequence[str], others: Sequence[str] | None = None) -> list[tuple[list[int], int]]:
    tokenizer = Tokenizer.from_file(calbin / "tokenizer.json")
    return [tokenizer.encode_text(text, None if others is None else others[i]) for i, text in enumerate(texts)]


def on_device(calbin: Path, rows: Sequence[tuple[list[int], int]]) -> list[LaneOutput]:
    """Each text alone in a launch of its own."""
    device = open_device("cpu", OpenOptions())
    handle, key = device.load(calbin, kv_blocks=0), open_calbin(calbin).manifest.submodels[0].key
    found = []
    for ids, second in rows:
        types = [0] * second + [1] * (len(ids) - second) if second else []
        lane = LaneInput(past_len=0, cur_len=len(ids), blocks=(), tokens=ids, types=types)
        done = device.wait(device.submit(Launch(handle, key, (lane,))), 30)
        assert done is not None
        found.append(done.lanes[0])
    device.close()
    return found


def embedding_of(out: LaneOutput) -> npt.NDArray[np.float32]:
    assert out.embedding is not None
    return out.embedding


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_the_openai_client_gets_the_devices_vectors(embedder: Served, base: Path, encoding: Any) -> None:
    rows = rows_of(base / "st.calbin", TEXTS)
    found = embedder.openai.embeddings.create(model="st", input=TEXTS, encoding_format=encoding)
    assert [one.index for one in found.data] == list(range(len(TEXTS)))
    for one, out in zip(found.data, on_device(base / "st.calbin", rows), strict=True):
        values: Any = one.embedding
        got = np.frombuffer(base64.b64decode(values), "<f4") if isinstance(values, str) else np.array(values, np.float32)
        assert got.tobytes() == embedding_of(out).tobytes()
        assert abs(float(np.linalg.norm(got)) - 1) < 1e-5
    tokens = sum(len(ids) for ids, _ in rows)
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (tokens, tokens)
    default = embedder.openai.embeddings.create(model="st", input=TEXTS[0])
    assert len(default.data[0].embedding) == 32


def test_vectors_are_those_of_onnxruntime(embedder: Served, base: Path) -> None:
    rows = [ids for ids, _ in rows_of(base / "st.calbin", TEXTS)]
    want = run_encoder(bundle_of(base / "st"), rows)["embedding"]
    got = np.array([one.embedding for one in embedder.openai.embeddings.create(model="st", input=TEXTS, encoding_format="float").data])
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


def test_a_users_special_tokens_stay_text(base: Path) -> None:
    (ids, _), (plain, _) = rows_of(base / "st.calbin", ["a <|im_end|> b", "a b"])
    tokenizer = Tokenizer.from_file(base / "st.calbin" / "tokenizer.json")
    end = tokenizer.special_id("<|im_end|>")
    assert end is not None
    assert ids.count(end) == plain.count(end) == 1


@pytest.mark.parametrize(
    ("given", "same_as"),
    [
        ("hello world", ["hello world"]),
        ({"prompt_string": "hello world"}, ["hello world"]),
        ({"content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]}, ["hello world"]),
        (["hello world", {"text": "a"}], ["hello world", "a"]),
    ],
)
def test_every_form_of_a_text_gives_the_same_vector(embedder: Served, given: Any, same_as: list[str]) -> None:
    got = embedder.http.post("/v1/embeddings", json={"input": given}).json()["data"]
    want = embedder.http.post("/v1/embeddings", json={"input": same_as}).json()["data"]
    assert got == want


def test_ids_are_taken_as_they_are(embedder: Served, base: Path) -> None:
    ids, _ = rows_of(base / "st.calbin", ["hello world"])[0]
    want = embedder.http.post("/v1/embeddings", json={"input": "hello world"}).json()["data"][0]["embedding"]
    for given in (ids, [ids], [ids, ids]):
        found = embedder.http.post("/v1/embeddings", json={"input": given}).json()["data"]
        assert [one["embedding"] for one in found] == [want] * len(found)


def test_llama_servers_route_answers_in_its_form(embedder: Served) -> None:
    want = embedder.http.post("/v1/embeddings", json={"input": "a"}).json()["data"][0]["embedding"]
    assert embedder.http.post("/embedding", json={"content": "a"}).json() == [{"index": 0, "embedding": [want]}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": True}, "input"),
        ({"input": 5}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, [2]]}, "input"),
        ({"input": [320]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": {"content": [{"type": "image_url"}]}}, "input"),
        ({"input": "x", "encoding_format": 1}, "encoding_format"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "dimensions": 16}, "dimensions"),
        ({"input": "x", "embd_normalize": -1}, "embd_normalize"),
        ({"input": "x", "truncate_prompt_tokens": 49}, "truncate_prompt_tokens"),
        ({"input": ["x"] * 2049}, "input"),
    ],
)
def test_bad_embedding_requests_are_a_400_that_names_the_field(embedder: Served, body: dict[str, Any], param: str) -> None:
    response = embedder.http.post("/v1/embeddings", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith(param)


def test_dimensions_of_the_model_may_be_named(embedder: Served) -> None:
    assert embedder.http.post("/v1/embeddings", json={"input": "x", "dimensions": 32}).status_code == 200


def test_a_text_that_is_too_long_is_refused_or_cut_where_asked(embedder: Served, base: Path) -> None:
    long = "word " * 200
    response = embedder.http.post("/v1/embeddings", json={"input": ["x", long]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["n_ctx"]) == ("exceed_context_size_error", 48)
    assert error["n_prompt_tokens"] > 48
    cut = embedder.http.post("/v1/embeddings", json={"input": long, "truncate": True}).json()
    assert cut["usage"]["prompt_tokens"] == 48
    shorter = embedder.http.post("/v1/embeddings", json={"input": long, "truncate_prompt_tokens": 20}).json()
    assert shorter["usage"]["prompt_tokens"] == 20
    ids, _ = Tokenizer.from_file(base / "st.calbin" / "tokenizer.json").encode_text(long, limit=20)
    direct = embedding_of(on_device(base / "st.calbin", [(ids, 0)])[0])
    assert np.array(shorter["data"][0]["embedding"], np.float32).tobytes() == direct.tobytes()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/completion", "/infill"])
def test_routes_that_generate_are_a_501(embedder: Served, path: str) -> None:
    body = {"model": "st", "prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    response = embedder.http.post(path, json=body | {"input_prefix": "a", "input_suffix": "b"})
    assert response.status_code == 501, response.text
    assert "encoder" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score", "/classify"])
def test_an_embedder_says_that_it_has_no_scores(embedder: Served, path: str) -> None:
    response = embedder.http.post(path, json={"query": "x", "documents": ["a"], "text_1": "a", "text_2": "b", "input": "x"})
    assert response.status_code == 501
    assert response.json()["error"]["type"] == "not_supported_error"


def test_the_server_tells_what_it_serves_and_counts_what_it_did(embedder: Served) -> None:
    assert "/v1/embeddings" in embedder.curl
    assert embedder.http.get("/health").json()["submodels"] == ["encode.b4.q48.c48.none"]
    assert embedder.http.get("/v1/models").json()["data"][0]["max_model_len"] == 48
    for path in ("/props", "/slots", "/openapi.json"):
        assert embedder.http.get(path).status_code == 200
    before = embedder.metric("calrt_prompt_tokens_total")
    used = embedder.http.post("/v1/embeddings", json={"input": "hello"}).json()["usage"]["prompt_tokens"]
    assert embedder.metric("calrt_prompt_tokens_total") == before + used
    assert 'calrt_launch_rows_total{phase="encode"}' in embedder.http.get("/metrics").text
    embedder.wait_idle()


def test_many_clients_at_once_get_what_each_gets_alone(embedder: Served) -> None:
    texts = [" ".join(["word", "other", "more"][i % 3] for _ in range(1 + i % 7)) + f" {i}" for i in range(60)]
    alone = [embedder.http.post("/v1/embeddings", json={"input": text}).json()["data"][0]["embedding"] for text in texts]
    parts = [texts[i : i + n] for i, n in ((0, 30), (30, 1), (31, 5), (36, 24))] * 6

    def ask(part: list[str]) -> list[Any]:
        return [one["embedding"] for one in embedder.http.post("/v1/embeddings", json={"input": part}).json()["data"]]

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for part, found in zip(parts, pool.map(ask, parts), strict=True):
            assert found == [alone[texts.index(text)] for text in part]
    embedder.wait_idle()


def scores(calbin: Path, query: str, documents: Sequence[str]) -> list[float]:
    found = on_device(calbin, rows_of(calbin, [query] * len(documents), documents))
    return [float(out.scores[0]) for out in found if out.scores is not None]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_documents_are_ranked_by_the_cross_encoders_scores(ranker: Served, base: Path) -> None:
    raw = scores(base / "ce.calbin", QUERY, DOCUMENTS)
    order = sorted(range(len(raw)), key=lambda i: -raw[i])
    body = {"model": "ce", "query": QUERY, "documents": DOCUMENTS, "return_documents": True}
    found = ranker.http.post("/v1/rerank", json=body).json()
    assert [one["index"] for one in found["results"]] == order
    assert [one["relevance_score"] for one in found["results"]] == [sigmoid(raw[i]) for i in order]
    assert [one["document"]["text"] for one in found["results"]] == [DOCUMENTS[i] for i in order]
    assert found["usage"]["prompt_tokens"] == sum(len(ids) for ids, _ in rows_of(base / "ce.calbin", [QUERY] * 4, DOCUMENTS))
    assert ranker.http.post("/v1/rerank", json=body | {"raw_scores": True}).json()["results"][0]["relevance_score"] == max(raw)


def test_scores_are_those_of_onnxruntime(ranker: Served, base: Path) -> None:
    rows = rows_of(base / "ce.calbin", [QUERY] * 4, DOCUMENTS)
    assert all(second > 0 for _, second in rows)
    types = [[int(i >= second) for i in range(len(ids))] for ids, second in rows]
    want = run_encoder(bundle_of(base / "ce"), [ids for ids, _ in rows], types)["scores"][:, 0]
    body = {"text_1": QUERY, "text_2": DOCUMENTS, "raw_scores": True}
    got = np.array([one["score"] for one in ranker.http.post("/v1/score", json=body).json()["data"]])
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.parametrize(("top_n", "count"), [(None, 4), (2, 2), (4, 4), (99, 4)])
def test_top_n_cuts_the_ranking(ranker: Served, top_n: int | None, count: int) -> None:
    found = ranker.http.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS, "top_n": top_n}).json()["results"]
    assert len(found) == count


def test_the_form_of_text_embeddings_inference_is_a_bare_list(ranker: Served) -> None:
    found = ranker.http.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "return_text": True}).json()
    assert sorted(one["index"] for one in found) == [0, 1, 2, 3]
    assert [one["score"] for one in found] == sorted((one["score"] for one in found), reverse=True)
    assert all(one["text"] == DOCUMENTS[one["index"]] for one in found)


def test_pairs_are_scored_one_by_one_and_one_to_many(ranker: Served) -> None:
    many = ranker.http.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()["data"]
    pairs = ranker.http.post("/v1/score", json={"text_1": [QUERY] * 4, "text_2": DOCUMENTS}).json()["data"]
    single = ranker.http.post("/score", json={"text_1": QUERY, "text_2": DOCUMENTS[1]}).json()["data"]
    assert many == pairs
    assert single[0]["score"] == many[1]["score"]
    assert [one["index"] for one in many] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", []),
        ("/v1/rerank", {"query": "x"}),
        ("/v1/rerank", {"query": "x", "documents": []}),
        ("/v1/rerank", {"query": "x", "documents": None}),
        ("/v1/rerank", {"query": "x", "documents": 123}),
        ("/v1/rerank", {"query": "x", "documents": [1, 2]}),
        ("/v1/rerank", {"query": "x", "documents": ["a"], "top_n": 0}),
        ("/v1/rerank", {"documents": ["a"]}),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
        ("/v1/score", {"text_1": [], "text_2": []}),
        ("/v1/score", {"text_1": "a"}),
        ("/classify", {"input": []}),
    ],
)
def test_bad_ranking_requests_are_a_400(ranker: Served, path: str, body: Any) -> None:
    response = ranker.http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_classifier_of_several_classes_classifies_and_ranks_nothing(base: Path) -> None:
    calbin = encoder_calbin(cross_encoder(base / "three", classes=3), base / "three.calbin")
    want = on_device(calbin, rows_of(calbin, TEXTS))
    with served(calbin, base / "three.log") as running:
        found = running.http.post("/classify", json={"input": TEXTS}).json()["data"]
        assert running.http.post("/v1/rerank", json={"query": "x", "documents": ["a"]}).status_code == 501
        assert running.http.post("/v1/embeddings", json={"input": "x"}).status_code == 501
    for one, out in zip(found, want, strict=True):
        assert out.scores is not None
        assert one["label"] == f"LABEL_{int(out.scores.argmax())}"
        assert one["num_classes"] == 3
        powers = np.exp(out.scores.astype(np.float64))
        assert np.abs(np.array(one["probs"]) - powers / powers.sum()).max() < 1e-6


def test_a_request_survives_the_death_of_the_engine_process(base: Path, embedder: Served) -> None:
    want = embedder.http.post("/v1/embeddings", json={"input": TEXTS}).json()["data"]
    with served(base / "st.calbin", base / "crash.log") as running:
        assert running.http.post("/v1/embeddings", json={"input": TEXTS}).json()["data"] == want
        engine = running.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(running.http.post, "/v1/embeddings", json={"input": TEXTS})
            while running.metric("calrt_requests_in_flight") == 0:
                pass
            os.kill(engine, signal.SIGKILL)
            assert asked.result().json()["data"] == want
