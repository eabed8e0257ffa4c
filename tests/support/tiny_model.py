"""A calbin directory as far as the server reads it: a small byte-level tokenizer, a ChatML-like template, a manifest."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from calstack.specs import ModelSpec, RopeSpec

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|say|>", "<|crash|>", "<|error|>", "<|slow|>", "<|hang|>", "<|random|>", "<|long|>"]
TEXT = "the quick brown fox jumps over the lazy dog and says hello to the world; system user assistant tool\n" * 3
TEMPLATE = """{%- for message in messages -%}
{%- if message.role == 'tool' and not message.content -%}{{ raise_exception('a tool message needs content') }}{%- endif -%}
{{ '<|im_start|>' + message.role + '<|say|>' + message.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant<|say|>' }}{%- endif -%}"""
STRICT_TEMPLATE = (
    "{%- for m in messages -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}"
    "{{ '<|im_start|>' + m.role + '<|say|>' + m.content + '<|im_end|>' }}{%- endfor -%}<|im_start|>assistant<|say|>"
)


@functools.lru_cache
def tokenizer_json() -> str:
    """A trained tokenizer of about 400 ids, in which emoji and CJK split into bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    return str(tokenizer.to_str())


def special(name: str) -> int:
    """Id of a special token."""
    return SPECIALS.index(name)


def vocab_size() -> int:
    return int(Tokenizer.from_str(tokenizer_json()).get_vocab_size())


def write_calbin(
    directory: Path, *, template: str | None = TEMPLATE, generation: dict[str, Any] | None = None, more_specials: Sequence[str] = ()
) -> Path:
    """Write what the server reads; gives the directory."""
    tokenizer = Tokenizer.from_str(tokenizer_json())
    tokenizer.add_special_tokens(list(more_specials))
    path = directory / "tiny.calbin"
    path.mkdir(parents=True)
    spec = ModelSpec(
        arch="llama", name="tiny", layers=1, hidden=32, intermediate=64, heads=2, kv_heads=1, head_dim=16, context=512,
        vocab=tokenizer.get_vocab_size(), rope=RopeSpec(dim=16), bos_ids=(special("<|im_start|>"),), eos_ids=(special("<|im_end|>"),),
    )  # fmt: skip
    manifest = {"format_major": 1, "format_minor": 0, "model": msgspec.to_builtins(spec)}
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / "tokenizer.json").write_text(tokenizer.to_str())
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    if generation is not None:
        (path / "generation.json").write_text(json.dumps(generation))
    return path
