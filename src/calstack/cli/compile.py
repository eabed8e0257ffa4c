"""`calstack compile` and `calstack pull`."""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calstack.cli.app import Context
from calstack.cli.params import compile_options, json_option
from calstack.cli.progress import show_progress
from calstack.errors import UsageError
from calstack.specs import KVDType, QuantSpec, parse_quant
from calstack.targets.spec import load_target

if TYPE_CHECKING:
    from calstack.api import CompileOptions
    from calstack.progress import Progress

__all__ = ["compile_command", "pull"]

COMPILE_EXAMPLE = "Example: calstack compile model.gguf -o model.calbin --batch 1,4,8,16"
PULL_EXAMPLE = "Example: calstack pull smollm2-135m"


@click.command("compile", epilog=COMPILE_EXAMPLE)
@click.argument("source")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="Directory to write, m.calbin by custom.")
@compile_options
@click.option("--keep-onnx", type=click.Path(path_type=Path), help="Write the graphs there too; that directory compiles again.")
@click.option("--quality/--no-quality", default=True, show_default=True, help="Measure perplexity and KL for the quality card.")
@click.option("--quality-text", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Text to measure quality on.")
@click.option("--explain", is_flag=True, help="Say on stderr what each pass did, and why rules did not match.")
@click.option("--dump-after", metavar="PASS", default="", help="Print the first graph after a pass on stderr, fuse/linear for example.")
@click.option("-f", "--force", is_flag=True, help="Replace OUT if it exists.")
@json_option
@click.pass_obj
def compile_command(
    obj: Context, /, source: str, out: Path, explain: bool, dump_after: str, force: bool, as_json: bool, **choices: Any
) -> None:
    """Compile SOURCE into a calbin.

    SOURCE is a GGUF file, a Hugging Face directory (config.json, safetensors, tokenizer.json), a directory of
    ONNX graphs that --keep-onnx wrote, a hub id (org/name), or a demo name.
    """
    options = _options(source, **choices)
    _check_out(out, force=force)
    with show_progress() as progress:
        if explain or dump_after:
            _explain(source, obj.cache, progress, explain=explain, dump_after=dump_after)
        _compile(source, out, options, obj.cache, progress, force=force)
    _print_path(out, as_json)


def _explain(source: str, cache: Path, progress: Progress, *, explain: bool, dump_after: str) -> None:
    from calstack import api
    from calstack.frontends import hub

    path = hub.resolve(source, cache, progress)
    if explain:
        click.echo(api.explain_passes(path), err=True)
    if dump_after:
        click.echo(api.explain_passes(path, dump_after=dump_after), err=True)


@click.command(epilog=PULL_EXAMPLE)
@click.argument("name")
@compile_options
@click.option("--quality/--no-quality", default=True, show_default=True, help="Measure perplexity and KL for the quality card.")
@click.option("-f", "--force", is_flag=True, help="Compile again even if the cache has it.")
@json_option
@click.pass_obj
def pull(obj: Context, /, name: str, force: bool, as_json: bool, **choices: Any) -> None:
    """Fetch NAME, compile it unless the cache has it, and print the calbin's path as the last line.

    NAME is a demo name or a hub id (org/name).
    """
    from calstack.frontends import hub

    if name not in hub.demos() and not hub.is_hub_id(name):
        raise UsageError(
            "no such demo model", where=name, remedy=f"demo models: {', '.join(hub.demos())}; for a path use `calstack compile`"
        )
    options = _options(name, **choices, keep_onnx=None, quality_text=None)
    from calstack.cli.store import calbin_path, is_whole

    out = calbin_path(obj.cache, name, options)
    if force or not is_whole(out):
        with show_progress() as progress, hub.cache_lock(out.parent, progress):
            if force or not is_whole(out):  # else another process has just compiled it
                _compile(name, out, options, obj.cache, progress, force=True)
    _print_path(out, as_json)


def _options(
    source: str,
    *,
    quant: QuantSpec | None,
    kv_dtype: str | None,
    quality_text: Path | None,
    batches: tuple[int, ...],
    keep_onnx: Path | None,
    **choices: Any,
) -> CompileOptions:
    if util.find_spec("onnx_ir") is None or util.find_spec("onnxruntime") is None:
        raise UsageError("compiling needs the compile extra", remedy="pip install 'calstack[compile]'")
    from calstack.api import CompileOptions
    from calstack.frontends import hub

    text = quality_text.read_text("utf-8") if quality_text else None
    kv = KVDType(kv_dtype) if kv_dtype else None
    demo = None if Path(source).exists() else hub.demos().get(source)
    quant = quant or parse_quant(default_quant(choices["target"], demo.quant if demo else "source"))
    return CompileOptions(quant=quant, batches=batches, keep_onnx=keep_onnx, kv_dtype=kv, quality_text=text, **choices)


def default_quant(target: str, otherwise: str) -> str:
    """What `--quant` is when nobody gave it: the target's recipe."""
    recipe = load_target(target).recipe
    return otherwise if recipe is None else recipe.quant


def _check_out(out: Path, *, force: bool) -> None:
    if not out.exists():
        return
    if not force:
        raise UsageError("exists already", where=str(out), remedy="choose another name, or --force")
    if not (out / "manifest.json").is_file():
        raise UsageError("is not a calbin, so it is not replaced", where=str(out), remedy="remove it yourself")


def _compile(source: str, out: Path, options: CompileOptions, cache: Path, progress: Progress, *, force: bool) -> None:
    from calstack import api
    from calstack.frontends import hub

    path = hub.resolve(source, cache, progress)
    api.compile_model(path, out, options=options, progress=progress, replace=force)


def _print_path(out: Path, as_json: bool) -> None:
    click.echo(json.dumps({"calbin": str(out)}) if as_json else str(out))
