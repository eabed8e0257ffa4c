"""The package in Python: compile a model, verify a calbin. The only room beside `quality` that sees both sides.

The compile side is imported when it is used, so that a serving install needs none of it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calstack.calbin.reader import open_calbin
from calstack.devices.base import CallTime, Completion, OpenOptions
from calstack.devices.machine import usable_cores
from calstack.devices.registry import open_device
from calstack.errors import ArtifactError, UsageError
from calstack.llm import LLM, load
from calstack.progress import Progress, Silent
from calstack.quality.verify import VerifyReport, verify_calbin
from calstack.runtime.direct import DirectRunner
from calstack.specs import KVDType, QuantSpec, WeightFormat
from calstack.targets.spec import load_target

if TYPE_CHECKING:
    from calstack.compiler.inventory import OperatorRow
    from calstack.compiler.options import CompileOptions as CompilerOptions
    from calstack.graph.model import GraphBundle
    from calstack.plan import PlanReport
    from calstack.targets.spec import TargetSpec

_DECODER_CARD = ("perplexity", "reference_perplexity", "kl_mean", "kl_p99", "top1")

__all__ = [
    "LLM",
    "CallTime",
    "Ceilings",
    "CompileOptions",
    "Completion",
    "OpenOptions",
    "VerifyReport",
    "ceilings",
    "compile_model",
    "load",
    "open_direct",
    "quality_summary",
    "usable_cores",
    "verify",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """What to compile. Every field has the default that suits serving."""

    target: str = "cpu"
    quant: QuantSpec = dataclasses.field(default_factory=QuantSpec)
    batches: tuple[int, ...] = (1, 4, 8, 16)  # of the decode submodels
    context: int | None = None  # most positions of a request; None = the model's own, at most 8,192
    kv_dtype: KVDType | None = None  # None = f32 for f32 weights, else bf16
    keep_onnx: Path | None = None  # write the graphs there too
    quality: bool = True  # measure the quality card
    quality_text: str | None = None  # None = the bundled text

    def for_compiler(self) -> CompilerOptions:
        """The compiler's part."""
        from calstack.compiler.options import CompileOptions as Options

        plain = KVDType.F32 if self.quant.default is WeightFormat.F32 else KVDType.BF16
        return Options(
            target=self.target, quant=self.quant, batches=self.batches, context=self.context or 0, kv_dtype=self.kv_dtype or plain
        )


def compile_model(
    source: str | Path,
    out: str | Path,
    *,
    options: CompileOptions | None = None,
    progress: Progress | None = None,
    replace: bool = False,
) -> Path:
    """Compile a GGUF file, a Hugging Face directory or a kept ONNX directory into a sealed calbin at `out`.

    Raises:
        SourceError, UnsupportedError, UsageError: one line each; nothing is left behind then.
    """
    from calstack.calbin.writer import CalbinWriter
    from calstack.compiler.pipeline import compile_into
    from calstack.frontends import open_source
    from calstack.graph.evaluate import Oracle
    from calstack.quality.encoder import add_encoder_quality
    from calstack.quality.join import add_quality
    from calstack.quality.text import QualityText, bundled_text

    options, progress = options or CompileOptions(), progress or Silent()
    wanted = options.for_compiler()
    with CalbinWriter(Path(out), replace=replace) as writer:
        progress.stage("open")
        bundle = open_source(Path(source), progress=progress)
        manifest = compile_into(bundle, writer, wanted, progress)
        if options.keep_onnx is not None:
            _keep_onnx(bundle, options.keep_onnx, progress)
        if manifest.weightless:
            return writer.seal(manifest)
        text = None if options.quality_text is None else QualityText("given text", options.quality_text)
        if manifest.model.encoder is not None:
            progress.stage("goldens")
            manifest = add_encoder_quality(writer, manifest, bundle, text or bundled_text(), card=options.quality)
        else:
            manifest = add_quality(writer, manifest, Oracle(bundle), bundle.tokenizer_json, progress, card=options.quality, text=text)
        return writer.seal(manifest)


def _keep_onnx(bundle: GraphBundle, out: Path, progress: Progress) -> None:
    from calstack.frontends.onnx_dir import keep_onnx

    keep_onnx(bundle, out, progress=progress)


def measured_target(nbytes: int = 256 << 20) -> TargetSpec:
    """The cpu target with this machine's ceilings, that of memory over a buffer of `nbytes`."""
    from calstack.plan import measured

    found = ceilings(nbytes=min(max(nbytes, 1 << 20), 1 << 30))
    return measured(load_target("cpu"), found.read_gb_s, found.int8_gop_s)


def inventory(path: Path) -> list[OperatorRow]:
    """Every operator of a model's graphs, or of any ONNX file, sorted by what the compiler does with it.

    Raises:
        SourceError, UnsupportedError: when the source cannot be opened.
    """
    from calstack.compiler.inventory import list_operators
    from calstack.frontends import open_source
    from calstack.frontends.onnx_any import read_onnx

    if path.suffix == ".onnx":
        return list_operators([read_onnx(path)])
    return list_operators(list(open_source(path).graphs.values()))


def explain_passes(source: Path, *, dump_after: str = "") -> str:
    """What each pass did to the first graph of a source and why rules did not match; with `dump_after`, the graph after that pass.

    Raises:
        UsageError: when there is no such pass. SourceError, UnsupportedError: when the source cannot be opened.
    """
    from calstack.compiler.pipeline import trace_passes
    from calstack.frontends import open_source

    traces = trace_passes(next(iter(open_source(source).graphs.values())))
    names = [trace.name for trace in traces]
    if dump_after:
        if dump_after not in names:
            raise UsageError(f"there is no pass {dump_after!r}", where="--dump-after", remedy=f"passes: {', '.join(names)}")
        return traces[names.index(dump_after)].text
    lines = []
    for trace in traces:
        lines.append(f"{trace.name}: {'changed the graph' if trace.changed else 'no match'}, {trace.nodes} nodes left")
        reasons: dict[str, int] = {}
        for miss in trace.misses:
            reasons[miss.reason] = reasons.get(miss.reason, 0) + 1
        lines += [f"  {count} x {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1])[:3]]
    return "\n".join(lines)


def plan_model(
    source: str | Path, *, options: CompileOptions | None = None, contexts: Sequence[int] = (), quant: str = "source"
) -> PlanReport:
    """What a model takes on a target and how fast it should run, without reading its weights.

    Raises:
        SourceError, UnsupportedError, UsageError: as `compile_model`, before any long work.
    """
    from calstack.plan import make_plan

    options = options or CompileOptions()
    target = load_target(options.target)
    target_for = measured_target if options.target == "cpu" else lambda _: target
    return make_plan(Path(source), options.for_compiler(), target_for, contexts=contexts, quant=quant)


def verify(
    calbin: str | Path, *, device: str = "cpu", isa: str = "", threads: int = 0, progress: Progress | None = None, full: bool = False
) -> VerifyReport:
    """Hash every file of a calbin, then run each submodel's goldens on a device; `full` also makes cases around every edge on the spot.

    Raises:
        ArtifactError: when a file is damaged. DeviceError: when the device fails.
    """
    opened = open_device(device, OpenOptions(isa=isa, threads=threads))
    try:
        return verify_calbin(Path(calbin), opened, progress or Silent(), full=full)
    finally:
        opened.close()


def open_direct(
    calbin: str | Path,
    *,
    device: str = "cpu",
    isa: str = "",
    threads: int = 0,
    lanes: int = 1,
    positions: int = 0,
    completion: str = "event",
) -> DirectRunner:
    """A calbin on a device without scheduler or engine; `positions` of 0 means its whole context.

    Raises:
        ArtifactError, DeviceError, UsageError.
    """
    manifest = open_calbin(Path(calbin)).manifest
    opened = open_device(device, OpenOptions(isa=isa, threads=threads, completion=completion))
    most = max(s.context for s in manifest.submodels)
    return DirectRunner(opened, Path(calbin), manifest, lanes=lanes, positions=positions or most)


@dataclasses.dataclass(frozen=True, slots=True)
class Ceilings:
    """What this machine's memory and int8 units give at most."""

    read_gb_s: float
    int8_gop_s: float  # multiply and add counted each


def ceilings(*, isa: str = "", threads: int = 0, nbytes: int = 256 << 20) -> Ceilings:
    """Measure both ceilings with the cpu device's instruction set `isa`: a prefetching read over `nbytes`, int8 products in registers."""
    from calstack.native import kernels

    name, count = isa or kernels.isas()[-1], threads or usable_cores()
    return Ceilings(kernels.read_limit(name, count, nbytes), kernels.int8_peak(name, count))


def quality_summary(calbin: str | Path) -> dict[str, float | str]:
    """The calbin's quality card as a flat mapping; empty when none was measured.

    Raises:
        ArtifactError: when the card is damaged.
    """
    opened = open_calbin(Path(calbin))
    if not opened.has("quality.json"):
        return {}
    try:
        card = json.loads(opened.read("quality.json"))
        keys = ("cosine_mean", "cosine_min", "error") if "cosine_mean" in card else _DECODER_CARD
        numbers = {key: float(card[key]) for key in keys}
        return {"text": str(card["text"]["name"]), **numbers}
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"is not a quality card: {error!r}", where="quality.json", remedy="compile the model again") from error
