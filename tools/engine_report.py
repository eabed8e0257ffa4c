"""What serving keeps under load, cancellations, faults and crashes: measured on a real calbin through HTTP, and written down.

    python tools/engine_report.py m.calbin [--only exactness,nothing-lost,memory,recovery,overload,efficiency] [--scale 1.0] [--out DIR]

Every section starts `calstack serve` anew. `--scale` shrinks the numbers of requests, for a test. With `--out` the page
`engine-report.md` and `engine-report.json` are written there; the exit code is 1 when a figure misses what is asked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx

TEXT = (
    "The valley lay quiet between the hills. Every morning the miller opened his gate, counted the sacks, and wrote the number into a "
    "book that his father had begun. Travellers asked him for the way to the coast, and he told them what he told everybody. "
) * 8
GRAMMAR = 'root ::= ("yes" | "no" | "perhaps") ("," " " ("yes" | "no" | "perhaps"))* "."'
FAULTS = "faults:cpu?seed=11&rate=0.01&kinds=busy,retryable,reset,short,wrong,nan,slow"


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One thing that was measured, what is asked of it, and whether it is met."""

    section: str
    what: str
    asked: str
    measured: str
    met: bool


class Server:
    """`calstack serve` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str, http: httpx.AsyncClient) -> None:
        self.process, self.url, self.http = process, url, http

    def engine_pid(self) -> int:
        """The engine process; 0 while there is none."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        named = [int(c) for c in children if " engine " in Path(f"/proc/{c}/cmdline").read_text().replace("\0", " ")]
        return named[0] if named else 0

    def pss_mib(self) -> float:
        """Proportional set size of both processes."""
        total = 0
        for pid in (self.process.pid, self.engine_pid()):
            total += sum(
                int(line.split()[1]) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:")
            )
        return total / 1024

    def descriptors(self) -> int:
        """Open files of both processes."""
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (self.process.pid, self.engine_pid()))

    async def metrics(self) -> dict[str, float]:
        """Every series by its name with labels."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line and line[0] != "#")}

    async def idle(self, seconds: float = 20.0) -> dict[str, float]:
        """The metrics once nothing runs; what is left over when `seconds` have passed."""
        names = ("calrt_requests_in_flight", "calrt_kv_used_batches", "calrt_running_requests", "calrt_queued_requests")
        end = time.monotonic() + seconds
        while True:
            found = await self.metrics()
            if all(found[name] == 0 for name in names) or time.monotonic() > end:
                return found
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def served(calbin: Path, *options: str) -> AsyncIterator[Server]:
    """A server on a free port, ended at the end."""
    with tempfile.TemporaryFile("w") as errors:
        command = [sys.executable, "-m", "calstack", "serve", str(calbin), "--port", "0", *options]
        process = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split(" at ")[1].split()[0]
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
                yield Server(process, url, http)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            if process.stdout is not None:
                process.stdout.close()


def request(rng: random.Random, number: int) -> dict[str, Any]:
    """A request of llama-server's kind: greedy or seeded, some with a shared beginning, penalties or a grammar."""
    words = TEXT.split(" ")
    start = 0 if number % 3 == 0 else rng.randrange(len(words) // 2)
    body: dict[str, Any] = {
        "prompt": " ".join(words[start : start + rng.randrange(10, 260)]),
        "n_predict": rng.randrange(64, 97),
        "seed": number,
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0]),
        "return_tokens": True,
        "stream": True,
    }
    if number % 5 == 1:
        body |= {"repeat_penalty": 1.1, "frequency_penalty": 0.1}
    if number % 7 == 2:
        body["grammar"] = GRAMMAR
    else:
        body["ignore_eos"] = True
    return body


async def stream(server: Server, body: dict[str, Any], *, leave_after: int = -1) -> tuple[list[int], str]:
    """Ids of an answer and how it ended: a stop type, "left" by us, "error", or "lost" when the stream breaks off."""
    ids: list[int] = []
    try:
        async with server.http.stream("POST", "/completion", json=body) as answer:
            if answer.status_code != 200:
                return ids, f"error {answer.status_code}"
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return ids, "error"
                ids += event["tokens"]
                if event.get("stop"):
                    return ids, str(event["stop_type"])
                if 0 <= leave_after <= len(ids):
                    return ids, "left"
    except httpx.HTTPError:
        return ids, "lost"
    return ids, "lost"


async def crowd(jobs: list[Callable[[], Awaitable[Any]]], width: int) -> list[Any]:
    """Results of the jobs, `width` at a time."""
    gate = asyncio.Semaphore(width)

    async def one(job: Callable[[], Awaitable[Any]]) -> Any:
        async with gate:
            return await job()

    return await asyncio.gather(*(one(job) for job in jobs))


# --- sections ----------------------------------------------------------------------------------------------------------------------


async def exactness(calbin: Path, scale: float) -> list[Figure]:
    """The same ids alone on a cold engine, and among others with cancellations, prefix hits, small chunks, guesses and one crash."""
    rng, count = random.Random(5), max(16, int(200 * scale))
    bodies = [request(rng, i) for i in range(count)]
    async with served(calbin, "--prefill-chunk", "512", "--no-speculation") as server:
        alone = [await stream(server, body | {"cache_prompt": False}) for body in bodies]
    figures = []
    for chunk in ("16", "100", "512"):
        async with served(calbin, "--prefill-chunk", chunk, "--speculation") as server:
            jobs: list[Callable[[], Awaitable[Any]]] = [lambda b=body: stream(server, b) for body in bodies]  # type: ignore[misc]
            for i in range(count // 5):
                place, body, most = rng.randrange(len(jobs)), request(rng, 10_000 + i), rng.randrange(40)
                jobs.insert(place, lambda b=body, n=most: stream(server, b, leave_after=n))  # type: ignore[misc]
            killer = asyncio.create_task(_kill_in(server, 0.4 * count / 16))
            results = [r for r in await crowd(jobs, 16) if r[1] != "left"]
            await killer
            hits = (await server.idle())["calrt_prefix_hits_total"]
        kept = {json.dumps(r) for r in results}
        same = sum(json.dumps(one) in kept for one in alone)
        text = f"{same} of {count} the same ({hits:.0f} prefix hits, 1 crash)"
        figures.append(Figure("exactness", f"ids alone and 16 at a time, chunks of {chunk}", f"all {count}", text, same == count))
    return figures


async def _kill_in(server: Server, seconds: float) -> None:
    await asyncio.sleep(seconds)
    os.kill(server.engine_pid(), signal.SIGKILL)


async def nothing_lost(calbin: Path, scale: float) -> list[Figure]:
    """Every stream ends, whatever is cancelled and whatever the device does; and everything goes back."""
    rng, half = random.Random(6), max(60, int(1000 * scale))
    async with served(calbin, "--device", FAULTS, "--max-queued-requests", "64") as server:
        killer = asyncio.create_task(_kill_in(server, 3.0))
        ends = await crowd([_brief(server, rng, i, cancel=i % 5 == 0) for i in range(half)], 24)
        await killer
        await server.idle()
        files = server.descriptors()  # after the first half: the compilers of grammars run by now
        ends += await crowd([_brief(server, rng, i, cancel=i % 5 == 0) for i in range(half, 2 * half)], 24)
        found = await server.idle()
        await server.http.aclose()
        await asyncio.sleep(1.0)
        open_files = server.descriptors()
    lost, errors = ends.count("lost"), sum(end.startswith("error") for end in ends)
    left = sum(found[name] for name in ("calrt_kv_used_batches", "calrt_requests_in_flight", "calrt_running_requests"))
    left += found.get('calrt_engine_events_total{event="leaks"}', 0.0)
    kinds = f"{ends.count('limit') + ends.count('eos')} finished, {ends.count('left')} left, {errors} with an error"
    faults = f"{found['calrt_launch_retries_total']:.0f} retries and {found['calrt_device_resets_total']:.0f} resets of the device"
    what = f"{2 * half} requests, a fifth left at a random time, the engine killed once, {faults}"
    return [
        Figure("nothing lost", what, "0 lost", f"{lost} lost; {kinds}", lost == 0),
        Figure("nothing lost", "lanes and requests in use and leaked blocks afterwards", "0", f"{left:.0f}", left == 0),
        Figure("nothing lost", "open descriptors", f"at most {files}", str(open_files), open_files <= files),
    ]


def _brief(server: Server, rng: random.Random, number: int, *, cancel: bool) -> Callable[[], Awaitable[str]]:
    body = request(rng, number) | {"n_predict": rng.randrange(4, 40)}
    when = rng.random() * 0.5

    async def run() -> str:
        if not cancel:
            return (await stream(server, body))[1]
        task = asyncio.create_task(stream(server, body))
        done, _ = await asyncio.wait([task], timeout=when)
        if done:
            return task.result()[1]
        task.cancel()
        return "left"

    return run


async def memory(calbin: Path, scale: float) -> list[Figure]:
    """Memory of both processes: flat once the prefix cache is full, and bounded with eight long requests in it."""
    rng, part = random.Random(7), max(20, int(200 * scale))
    async with served(calbin, "--max-queued-requests", "64") as server:
        seen = []
        for start in range(0, 15 * part, part):  # the first third fills the prefix cache
            await crowd([_brief(server, rng, i, cancel=i % 5 == 0) for i in range(start, start + part)], 24)
            await server.idle()
            seen.append(server.pss_mib())
    growth = (statistics.median(seen[-3:]) - statistics.median(seen[5:8])) / (7 * part / 100)
    async with served(calbin) as server:
        bodies = [
            {
                "prompt": [(k * 131 + j * j) % 20_000 for j in range(1900)],
                "n_predict": 148,
                "ignore_eos": True,
                "stream": True,
                "return_tokens": True,
            }
            for k in range(8)
        ]
        tasks, most = [asyncio.create_task(stream(server, body)) for body in bodies], 0.0
        while not all(task.done() for task in tasks):
            most = max(most, server.pss_mib())
            await asyncio.sleep(0.2)
    return [
        Figure("memory", f"growth of PSS per 100 requests, behind the first {5 * part}", "< 1 MiB", f"{growth:.2f} MiB", growth < 1.0),
        Figure("memory", "PSS with 8 x 2,048 positions in use", "< 700 MB", f"{most * 1.048576:.0f} MB", most * 1.048576 < 700),
    ]


async def recovery(calbin: Path, scale: float) -> list[Figure]:
    """From kill -9 of the engine process to the next token; the stream goes on as if nothing had happened."""
    del scale
    body = {
        "prompt": TEXT[:300],
        "n_predict": 256,
        "temperature": 0.8,
        "seed": 3,
        "ignore_eos": True,
        "return_tokens": True,
        "stream": True,
    }
    gaps, same, readiness = [], True, []
    async with served(calbin) as server:
        whole, _ = await stream(server, body)
        for _ in range(5):
            ids, gap, ready = await _interrupted(server, body, after=100)
            gaps.append(gap)
            same &= ids == whole
            readiness.append(ready)
        bodies = [body | {"prompt": TEXT[i * 40 : i * 40 + 400], "seed": i} for i in range(16)]
        alone = [await stream(server, b) for b in bodies]
        began: list[float] = []
        together = await asyncio.gather(*(_interrupted(server, b, after=60, kill=i == 0, seen=began) for i, b in enumerate(bodies)))
        many = max(gap for _, gap, _ in together)
        many_same = [ids for ids, _, _ in together] == [ids for ids, _ in alone]
    worst = f"{statistics.median(gaps):.2f} s, at most {max(gaps):.2f} s"
    return [
        Figure("recovery", "one stream of 256 ids: kill -9 to the next id", "< 2 s", worst, max(gaps) < 2.0),
        Figure("recovery", "ids of the interrupted stream", "the same", "the same" if same else "others", same),
        Figure("recovery", "readiness while there is no engine", "503", "503" if all(readiness) else "200", all(readiness)),
        Figure("recovery", "16 streams: longest gap", "< 2 s and the prompts' time", f"{many:.2f} s", many < 3.0),
        Figure("recovery", "ids of the 16 streams", "the same", "the same" if many_same else "others", many_same),
    ]


async def _interrupted(
    server: Server, body: dict[str, Any], *, after: int, kill: bool = True, seen: list[float] | None = None
) -> tuple[list[int], float, bool]:
    """Ids, the longest gap between two events, and whether readiness was 503 right after the kill."""
    ids: list[int] = []
    gap, last, killed, ready = 0.0, time.monotonic(), False, not kill
    async with server.http.stream("POST", "/completion", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            now = time.monotonic()
            gap, last = max(gap, now - last) if ids else gap, now
            if seen is not None:
                seen.append(now)
            ids += json.loads(line[6:])["tokens"]
            if kill and not killed and len(ids) >= after:
                killed = True
                os.kill(server.engine_pid(), signal.SIGKILL)
                await asyncio.sleep(0.05)
                ready = (await server.http.get("/health")).status_code == 503
    return ids, gap, ready


async def overload(calbin: Path, scale: float) -> list[Figure]:
    """Many requests at once against a short queue: quick refusals, and probes that are still answered."""
    count = max(100, int(500 * scale))
    body = {"prompt": TEXT[:200], "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    async with served(calbin, "--max-queued-requests", "32") as server:
        await server.http.post("/v1/completions", json=body)
        refused: list[float] = []
        headers: list[bool] = []
        ends: list[int] = []

        async def one() -> None:
            status, head, seconds = await _post(server, body)
            ends.append(status)
            if status == 429:
                refused.append(seconds)
                headers.append("retry-after:" in head)

        probes: list[float] = []
        load = asyncio.gather(*(one() for _ in range(count)))
        async with httpx.AsyncClient(base_url=server.url, timeout=10) as prober:
            while not load.done():
                for path in ("/health", "/metrics"):
                    began = time.monotonic()
                    await prober.get(path)
                    probes.append(time.monotonic() - began)
                await asyncio.sleep(0.05)
        await load
        found = await server.idle()
    p95 = statistics.quantiles(probes, n=20)[-1] * 1e3
    answered = ends.count(200) + ends.count(429)
    left = found["calrt_requests_in_flight"] + found["calrt_kv_used_batches"]
    return [
        Figure(
            "overload",
            f"{count} at once, queue of 32",
            "200 or 429 each",
            f"{ends.count(200)} answers, {ends.count(429)} refusals",
            answered == count,
        ),
        Figure(
            "overload",
            "time to refuse, seen by the client",
            "≤ 1 s",
            f"at most {max(refused, default=0):.2f} s",
            max(refused, default=0) <= 1.0,
        ),
        Figure("overload", "Retry-After on every refusal", "yes", "yes" if all(headers) else "no", all(headers)),
        Figure("overload", "/health and /metrics meanwhile, p95", "≤ 100 ms", f"{p95:.0f} ms", p95 <= 100),
        Figure("overload", "/health and /metrics meanwhile, longest", "≤ 500 ms", f"{max(probes) * 1e3:.0f} ms", max(probes) <= 0.5),
        Figure("overload", "lanes and requests afterwards", "0", f"{left:.0f}", left == 0),
    ]


async def efficiency(calbin: Path, scale: float) -> list[Figure]:
    """What a cached prefix, guesses and the target between two tokens do."""
    del scale
    async with served(calbin) as server:
        await _first_s(server, [7] * 64)
        cold, warm = [], []
        for i in range(5):
            ids = [1000 + (i * 37 + j * j) % 20_000 for j in range(1000)]
            cold.append(await _first_s(server, [*ids, 5, 6]))
            warm.append(await _first_s(server, [*ids, 8, 9]))
        share = statistics.median(warm) / statistics.median(cold)
        figures = [
            Figure(
                "efficiency", "time to first token behind a repeated prefix of 1,000 ids", "< 15 % of cold", f"{share:.0%}", share < 0.15
            )
        ]
        for streams, least in ((4, 0.80), (15, 0.65)):
            kept, p95 = await _beside_streams(server, streams)
            figures.append(
                Figure(
                    "efficiency",
                    f"prefill of 4,000 ids beside {streams} streams",
                    f"≥ {least:.0%} of its rate alone",
                    f"{kept:.0%}",
                    kept >= least,
                )
            )
            if streams == 4:
                figures.append(
                    Figure("efficiency", "between two ids of 4 streams meanwhile, p95", "≤ 75 ms", f"{p95 * 1e3:.0f} ms", p95 <= 0.075)
                )
    return [*figures, await _lookup(calbin)]


async def _first_s(server: Server, ids: list[int]) -> float:
    """Seconds to the first id behind a prompt."""
    began = time.monotonic()
    body = {"prompt": ids, "n_predict": 2, "temperature": 0, "stream": True, "ignore_eos": True}
    async with server.http.stream("POST", "/completion", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                return time.monotonic() - began
    return float("inf")


async def _beside_streams(server: Server, streams: int) -> tuple[float, float]:
    """A prefill's rate beside so many streams over its rate alone, and the 95th percentile of the streams' gaps meanwhile."""
    shares, gaps = [], []
    for i in range(3):
        alone = await _first_s(server, [(i * 131 + j * j + streams) % 20_000 for j in range(4000)])
        times: list[list[float]] = [[] for _ in range(streams)]
        bodies = [
            {"prompt": [50 + k, 60 + k], "n_predict": 800, "ignore_eos": True, "temperature": 1.0, "seed": k, "stream": True}
            for k in range(streams)
        ]
        tasks = [asyncio.create_task(_timed(server, body, seen)) for body, seen in zip(bodies, times, strict=True)]
        await asyncio.sleep(1.0)
        began = time.monotonic()
        beside = await _first_s(server, [(i * 137 + j * j + 7 * streams) % 20_000 for j in range(4000)])
        ended = time.monotonic()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        shares.append(alone / beside)
        gaps += [b - a for seen in times for a, b in itertools.pairwise(seen) if began <= b <= ended]
        await server.idle()
    return statistics.median(shares), statistics.quantiles(gaps, n=20)[-1]


async def _timed(server: Server, body: dict[str, Any], seen: list[float]) -> None:
    async with server.http.stream("POST", "/completion", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                seen.append(time.monotonic())  # noqa: PERF401  one by one: the stream may be left at any time


async def _lookup(calbin: Path) -> Figure:
    """Guesses from the prompt against none, on a text that goes on repeating itself."""
    body = {"prompt": TEXT[:900], "n_predict": 256, "temperature": 0, "ignore_eos": True, "return_tokens": True, "stream": True}
    found = []
    for option in ("--no-speculation", "--speculation"):
        async with served(calbin, option) as server:
            await stream(server, body)
            seconds = []
            for _ in range(3):
                began = time.monotonic()
                ids, _ = await stream(server, body)
                seconds.append(time.monotonic() - began)
            found.append((statistics.median(seconds), ids))
    gain, same = found[0][0] / found[1][0], found[0][1] == found[1][1]
    text = f"{gain:.1f} times, {'the same ids' if same else 'other ids'}"
    return Figure(
        "efficiency", "guesses from the prompt, on a text that repeats itself", "≥ 2 times as fast, the same ids", text, gain >= 2 and same
    )


async def _post(server: Server, body: dict[str, Any]) -> tuple[int, str, float]:
    """Status, head and seconds from the request's last byte; the plainest client there is, for its own time counts too."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    began = time.monotonic()
    answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    seconds = time.monotonic() - began
    writer.close()
    return int(answer.split()[1]), answer, seconds


SECTIONS: dict[str, Callable[[Path, float], Coroutine[Any, Any, list[Figure]]]] = {
    "exactness": exactness, "nothing-lost": nothing_lost, "memory": memory, "recovery": recovery, "overload": overload,
    "efficiency": efficiency,
}  # fmt: skip


def page(figures: list[Figure], machine: str) -> str:
    """The report as Markdown."""
    lines = [
        "# What serving keeps",
        "",
        "Measured through HTTP on SmolLM2-135M (`calstack pull smollm2-135m`), server and client on the same two cores, with",
        "",
    ]
    lines += ["    python tools/engine_report.py m.calbin --out docs/reference", "", f"{machine}", ""]
    lines += ["| section | what | asked | measured | |", "|---|---|---|---|---|"]
    lines += [f"| {f.section} | {f.what} | {f.asked} | {f.measured} | {'met' if f.met else '**not met**'} |" for f in figures]
    return "\n".join(lines) + "\n"


def _with_others(path: Path, figures: list[Figure]) -> list[Figure]:
    """The figures, and of the report at `path` those of sections that did not run now."""
    ran = {one.section for one in figures}
    old = [Figure(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []
    order = list(dict.fromkeys(one.section for one in (*old, *figures)))
    return sorted([one for one in old if one.section not in ran] + figures, key=lambda one: order.index(one.section))


def main() -> int:
    """Run the sections named; the exit code says whether all is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calbin", type=Path)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures: list[Figure] = []
    for name in options.only.split(","):
        found = asyncio.run(SECTIONS[name](options.calbin, options.scale))
        figures += found
        for one in found:
            print(f"{'met    ' if one.met else 'NOT MET'} {one.section}: {one.what}: {one.measured} (asked: {one.asked})", flush=True)
    if options.out is not None:
        from calstack.bench.machine import describe_machine

        machine = describe_machine(cores=os.cpu_count() or 1, threads=os.cpu_count() or 1, isa="")
        text = f"{machine.cpu}, {machine.cores} cores"
        figures = _with_others(options.out / "engine-report.json", figures)
        (options.out / "engine-report.md").write_text(page(figures, text))
        rows = [dataclasses.asdict(one) for one in figures]
        (options.out / "engine-report.json").write_text(json.dumps({"machine": text, "rows": rows}, indent=1) + "\n")
    return 0 if all(one.met for one in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
