"""An engine process without a model: it speaks wire.py over the real socket and answers by rule.

A prompt is answered with the ids after its last <|say|> that a <|im_end|> follows, or with the whole prompt where there is none
(FORCE: the prompt decides the answer), then ends as on an end-of-sequence id. Special ids in the prompt change the rule:
<|random|> draws letters from (seed, choice, index); <|long|> repeats the text for ever; <|slow|> waits 20 ms before each id;
<|hang|> gives nothing; <|error|> fails after two ids (before the first one when the prompt ends with it); <|crash|> kills the
process after two ids, only in a process whose crash file does not exist yet. A grammar is kept: where it forbids the id that the rule
gives, one that it allows is drawn, ends of strings and of the output first.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from calstack import wire
from calstack.grammar import Grammars, Matcher
from calstack.text.pieces import PieceTable

LENGTH = struct.Struct("<I")


@dataclasses.dataclass
class Rules:
    specials: dict[str, int]
    vocab: int
    lanes: int = 4
    context: int = 512
    ready_after_s: float = 0.0
    fail_start: str = ""
    reset_s: float = 0.0
    crash_file: str = ""
    crash_always: bool = False
    log_file: str = ""


class FakeEngine:
    def __init__(self, rules: Rules, calbin: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.rules, self.calbin, self.reader, self.writer = rules, calbin, reader, writer
        self.grammars: Grammars | None = None
        self.prompts: dict[str, int] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.lanes = asyncio.Semaphore(rules.lanes)
        self.running = 0
        self.started = 0
        self.background: set[asyncio.Task[None]] = set()

    def send(self, message: Any) -> None:
        body = msgspec.msgpack.encode(message)
        self.writer.write(LENGTH.pack(len(body)) + body)

    def note(self, what: str, **values: Any) -> None:
        if self.rules.log_file:
            with Path(self.rules.log_file).open("a") as file:
                file.write(json.dumps({"what": what, **values}) + "\n")

    async def run(self) -> None:
        await asyncio.sleep(self.rules.ready_after_s)
        if self.rules.fail_start:
            self.send(wire.EngineFailed(error=wire.ErrorValue(kind="ArtifactError", message=self.rules.fail_start)))
            await self.writer.drain()
            return
        self.send(wire.Ready(info=self.info()))
        decode = msgspec.msgpack.Decoder(wire.ServerMessage).decode
        while True:
            try:
                (size,) = LENGTH.unpack(await self.reader.readexactly(4))
                message = decode(await self.reader.readexactly(size))
            except asyncio.IncompleteReadError:
                return
            match message:
                case wire.Submit():
                    self.note(
                        "submit",
                        request=message.request,
                        output=len(message.output),
                        alone=message.alone,
                        prompt=message.prompt,
                        keep=message.keep,
                    )
                    self.prompts[message.request] = len(message.prompt)
                    self.tasks[message.request] = asyncio.create_task(self.serve(message))
                case wire.Cancel():
                    self.cancel(message.request)
                case wire.StatsRequest():
                    self.send(self.stats())
                case wire.DeviceCommand():
                    self.background.add(asyncio.create_task(self.command(message)))
                case wire.Stop() | wire.Drain():
                    return

    def info(self) -> wire.CalbinInfo:
        return wire.CalbinInfo(
            calbin="tiny", device="fake", context=self.rules.context, vocab=self.rules.vocab, max_lanes=self.rules.lanes, kv_blocks=64,
            kv_block_positions=16, submodels=("decode",), dram_total_bytes=1 << 20,
        )  # fmt: skip

    def stats(self) -> wire.EngineStats:
        waiting = len(self.tasks) - self.running
        return wire.EngineStats(
            lanes_used=self.running, queued_requests=waiting, queued_tokens=0, running=self.running, kv_blocks_used=self.running,
            kv_blocks_total=64, kv_wait_ms=0.0, dram_used_bytes=(4096,), device_status=0, times_s={"infer": 1.0}, counters={"steps": 3},
        )  # fmt: skip

    async def command(self, command: wire.DeviceCommand) -> None:
        """The fake device has no power modes and one register; a reset takes a while."""
        self.note("command", action=command.action, value=command.value)
        if command.action == "power":
            error = wire.ErrorValue(kind="UnsupportedError", message="this device has no power modes")
            self.send(wire.DeviceAnswer(id=command.id, error=error))
            return
        if command.action == "status" and Path(self.rules.log_file).with_name("mute").exists():
            return
        if command.action == "reset":
            await asyncio.sleep(self.rules.reset_s)
        if command.action == "dump":
            self.die()
        chip = wire.ChipState(
            id=0, used_bytes=4096, total_bytes=1 << 20, parameter_bytes=4096, kv_bytes=0, activation_bytes=0, buffer_bytes=0
        )
        text = "7" if command.action == "register" else ""
        self.send(wire.DeviceAnswer(id=command.id, device="fake", status="ready", chips=(chip,), text=text))

    def cancel(self, request: str) -> None:
        self.note("cancel", request=request, known=request in self.tasks)
        task = self.tasks.pop(request, None)
        if task is not None:
            task.cancel()
            self.out(request, finish=wire.Finish(reason="cancelled", usage=usage(self.prompts[request], 0, 0)))

    def out(self, request: str, ids: tuple[int, ...] = (), **more: Any) -> None:
        launch = wire.LaunchTimes(
            phase="decode", submodel="decode", rows=4, useful_rows=1, infer_ms=1.0, h2d_ms=0.1, d2h_ms=0.1, framework_ms=0.2
        )
        self.send(wire.StepOutput(tokens=(wire.TokenOut(request=request, ids=ids, **more),), launches=(launch,)))

    async def serve(self, submit: wire.Submit) -> None:
        async with self.lanes:
            self.running += 1
            self.note("start", request=submit.request)
            try:
                finish = await self.generate(submit)
            finally:
                self.running -= 1
        self.tasks.pop(submit.request, None)
        self.out(submit.request, finish=finish)

    async def generate(self, submit: wire.Submit) -> wire.Finish:
        has = {name for name, id_ in self.rules.specials.items() if id_ in submit.prompt}
        script = self.script(submit)
        count = len(submit.output)
        matcher = self.matcher(submit)
        if "<|error|>" in has and submit.prompt[-1] == self.rules.specials["<|error|>"]:
            return failed()
        if submit.prompt_logprobs >= 0:
            self.out(
                submit.request, prompt_start=1, prompt_logprobs=tuple(self.score(id_, submit.prompt_logprobs) for id_ in submit.prompt[1:])
            )
        while count < submit.max_tokens:
            if "<|hang|>" in has:
                await asyncio.sleep(3600)
            await asyncio.sleep(0.02 if "<|slow|>" in has else 0)
            id_ = self.next_id(submit, script, count, has)
            if matcher is not None:
                id_ = self.allowed(matcher, id_, f"{submit.seed}/{submit.choice}/{count}")
            if id_ in submit.stop_ids and count < submit.min_tokens:
                id_ = script[count % len(script)]
            if id_ in submit.stop_ids or id_ < 0:
                return wire.Finish(reason="stop", stop_id=id_, usage=usage(len(submit.prompt), count + 1, 0, cut=submit.cut))
            self.out(submit.request, (id_,), logprobs=(self.score(id_, submit.top_logprobs),) if submit.top_logprobs >= 0 else ())
            count += 1
            if count == 2 and "<|error|>" in has:
                return failed()
            if count >= 2 and "<|crash|>" in has:
                await self.crash()
        return wire.Finish(reason="length", usage=usage(len(submit.prompt), count, 0, cut=submit.cut))

    def score(self, id_: int, top: int) -> wire.TokenLogprob:
        tops = range(top)
        return wire.TokenLogprob(
            logprob=-(id_ % 7) / 4, top_ids=tuple((id_ + t) % self.rules.vocab for t in tops), top_logprobs=tuple(-t / 2 for t in tops)
        )

    def matcher(self, submit: wire.Submit) -> Matcher | None:
        if not submit.grammar:
            return None
        if self.grammars is None:
            text = (self.calbin / "tokenizer.json").read_text()
            self.grammars = Grammars(text, vocab=self.rules.vocab, eos=[self.rules.specials["<|im_end|>"]])
            self.pieces = PieceTable(Tokenizer.from_str(text), text)
        matcher = self.grammars.matcher(submit.grammar)
        for id_ in submit.output:
            assert matcher.consume(id_), "resumed against its grammar"
        return matcher

    def allowed(self, matcher: Matcher, wanted: int, key: str) -> int:
        mask = matcher.mask()
        ids = [id_ for id_ in range(self.rules.vocab) if mask[id_ >> 5] >> (id_ & 31) & 1]
        end = self.rules.specials["<|im_end|>"]
        if wanted == end or wanted not in ids:
            draw = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")
            in_text = any(self.pieces.bytes_of(id_) == b"a" for id_ in ids)
            closing = [id_ for id_ in ids if self.pieces.bytes_of(id_) in ({b'"'} if in_text else {b"}", b"]"})]
            wanted = end if end in ids else closing[draw % len(closing)] if closing and draw % 3 else ids[draw % len(ids)]
        if wanted != end:
            assert matcher.consume(wanted)
        return wanted

    async def crash(self) -> None:
        await self.writer.drain()
        self.die()

    def die(self) -> None:
        marker = Path(self.rules.crash_file)
        if self.rules.crash_always or not marker.exists():
            marker.touch()
            os._exit(77)

    def script(self, submit: wire.Submit) -> list[int]:
        say, end = self.rules.specials["<|say|>"], self.rules.specials["<|im_end|>"]
        prompt = list(submit.prompt)
        marks = [place for place, id_ in enumerate(prompt) if id_ == say and end in prompt[place:]]
        if not marks:
            return [id_ for id_ in prompt if id_ not in self.rules.specials.values()]
        return prompt[marks[-1] + 1 : prompt.index(end, marks[-1])]

    def next_id(self, submit: wire.Submit, script: list[int], count: int, has: set[str]) -> int:
        if "<|random|>" in has:
            key = f"{submit.seed}/{submit.choice}/{count}/{submit.sampling.temperature}".encode()
            return len(self.rules.specials) + 32 + hashlib.sha256(key).digest()[0] % 26
        if "<|long|>" in has or submit.ignore_eos:
            return script[count % len(script)]
        return script[count] if count < len(script) else self.rules.specials["<|im_end|>"]


def usage(prompt: int, output: int, cached: int, cut: int = 0) -> wire.Usage:
    return wire.Usage(
        prompt_tokens=prompt, output_tokens=output, cached_tokens=cached, queue_ms=0.5, prefill_ms=2.0, decode_ms=4.0, cut=cut
    )


def failed() -> wire.Finish:
    return wire.Finish(reason="error", error=wire.ErrorValue(kind="DeviceFatal", message="the fake device broke"))


async def serve(rules: Rules, calbin: Path, path: str) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    await FakeEngine(rules, calbin, reader, writer).run()
    await writer.drain()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rules")
    parser.add_argument("calbin")
    parser.add_argument("--connect", required=True)
    arguments, _ = parser.parse_known_args()
    asyncio.run(serve(Rules(**json.loads(Path(arguments.rules).read_text())), Path(arguments.calbin), arguments.connect))


if __name__ == "__main__":
    main()
