"""Limits of API keys."""

from __future__ import annotations

import concurrent.futures
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from calstack.errors import OverloadedError, UsageError
from calstack.server.access import Access
from calstack.server.accounts import Account, KeyLimits
from calstack.server.config import AccessConfig
from tests.support.live_server import LiveServer, live_server


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_requests_at_once_are_bounded_and_come_back() -> None:
    account = Account("a", KeyLimits(requests=2))
    first, _ = account.begin(), account.begin()
    with pytest.raises(OverloadedError, match="2 requests"):
        account.begin()
    first.end(0)
    account.begin()
    assert (account.requests, account.refused) == (2, 1)


def test_tokens_at_once_are_bounded_but_one_request_alone_may_exceed_them() -> None:
    account = Account("a", KeyLimits(tokens=100))
    big, small = account.begin(), account.begin()
    big.take(500)
    with pytest.raises(OverloadedError, match="100 tokens"):
        small.take(1)
    big.end(500)
    small.take(60)
    small.take(40)
    assert account.tokens == 100


def test_requests_in_a_minute_flow_back() -> None:
    time_ = Time()
    account = Account("a", KeyLimits(requests_per_minute=6), time_)
    for _ in range(6):
        account.begin().end(0)
    with pytest.raises(OverloadedError) as refused:
        account.begin()
    assert refused.value.retry_after == pytest.approx(10.0)
    time_.now += 10.0
    account.begin()
    with pytest.raises(OverloadedError):
        account.begin()


def test_tokens_in_a_minute_count_what_was_used() -> None:
    time_ = Time()
    account = Account("a", KeyLimits(tokens_per_minute=600), time_)
    hold = account.begin()
    hold.take(600)
    other = account.begin()
    with pytest.raises(OverloadedError) as refused:
        other.take(100)
    assert refused.value.retry_after == pytest.approx(10.0)
    hold.end(200)  # 400 were not used
    other.take(400)
    with pytest.raises(OverloadedError):
        other.take(10)


def test_request_larger_than_a_minutes_tokens_is_taken_when_the_minute_is_whole() -> None:
    account = Account("a", KeyLimits(tokens_per_minute=60), Time())
    account.begin().take(1000)
    with pytest.raises(OverloadedError):
        account.begin().take(1)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("keyed")
    file = directory / "keys"
    file.write_text(
        f"alice sha256:{digest('k1')} requests=1\nbob {digest('k2')} tokens=300 requests=0\n{digest('k3')}\n"
        f"dora {digest('k4')} requests_per_minute=2\neve {digest('k5')} tokens_per_minute=200 requests=0\n"
    )
    with live_server(directory, access=AccessConfig(api_key_file=file, key_requests=3)) as running:
        yield running


def complete(server: LiveServer, key: str, prompt: str, max_tokens: int = 10) -> int:
    body = {"prompt": prompt, "max_tokens": max_tokens}
    return server.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}).status_code


def codes_at_once(server: LiveServer, key: str, count: int, prompt: str, max_tokens: int = 10) -> list[int]:
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return sorted(pool.map(lambda _: complete(server, key, prompt, max_tokens), range(count)))


def test_one_key_at_its_limit_leaves_the_others_alone(keyed: LiveServer) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, keyed, "k1", "<|slow|>" + "a" * 30, 40)
        while keyed.context.admission.in_flight == 0:
            time.sleep(0.005)
        refused = keyed.http.post("/v1/completions", json={"prompt": "x"}, headers={"authorization": "Bearer k1"})
        assert complete(keyed, "k3", "x") == 200
        assert running.result() == 200
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(refused.headers["retry-after"]) >= 1
    assert complete(keyed, "k1", "x") == 200


def test_default_limit_holds_for_keys_that_have_none_of_their_own(keyed: LiveServer) -> None:
    codes = codes_at_once(keyed, "k3", 6, "<|slow|>" + "a" * 30, 40)
    assert codes == [200] * 3 + [429] * 3


def test_tokens_of_prompt_and_answer_count(keyed: LiveServer) -> None:
    codes = codes_at_once(keyed, "k2", 4, "<|slow|>" + "a" * 40, 60)  # 102 tokens each with BOS and the mark
    assert codes == [200, 200, 429, 429]


def test_official_client_sees_a_rate_limit_error(keyed: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="k4", max_retries=0)
    for _ in range(2):
        client.completions.create(model="tiny", prompt="hi", max_tokens=2)
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="tiny", prompt="hi", max_tokens=2)


def test_tokens_that_were_not_used_are_given_back(keyed: LiveServer) -> None:
    for _ in range(5):  # each may have 150 and uses less than 20
        assert complete(keyed, "k5", "hello", 140) == 200
    assert complete(keyed, "k5", "<|long|>abc", 80) == 200
    assert complete(keyed, "k5", "<|long|>abc", 150) == 429


def test_refused_and_failed_requests_give_everything_back(keyed: LiveServer) -> None:
    headers = {"authorization": "Bearer k1"}
    for body in ({"prompt": "x" * 2000}, {"prompt": ""}, {"prompt": "a<|error|>"}, {"prompt": "x", "n": 1000}, {"prompt": 3}):
        assert keyed.http.post("/v1/completions", json=body, headers=headers).status_code != 429
    accounts = [account for _, account in keyed.context.access._keys or []]
    keyed.http.headers["authorization"] = "Bearer k2"
    keyed.assert_idle_soon()
    assert [(account.requests, account.tokens) for account in accounts] == [(0, 0)] * 5


@pytest.mark.parametrize("tail", ["request=1", "requests=-1", "requests=x", "requests", "requests=1.5"])
def test_limit_that_does_not_exist_is_refused(tmp_path: Path, tail: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{digest('k')} {tail}\n")
    with pytest.raises(UsageError):
        Access(AccessConfig(api_key_file=file))
