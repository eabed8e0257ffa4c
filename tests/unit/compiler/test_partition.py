"""Programs over chips: outputs are split, nothing is lost or computed twice, and chips meet at the same points."""

from collections import Counter

import pytest

from calstack.calbin.program import AllGather, Attention, LmHead, NormLinear, QkNormRopeKv, Weight
from calstack.compiler.lower import Lowered, lower
from calstack.compiler.memory_plan import lifetimes
from calstack.compiler.partition import Shards, Stream, partition, shares
from calstack.compiler.pipeline import fuse_graph
from calstack.compiler.quantize.table import ParameterTable
from calstack.errors import UnsupportedError
from calstack.specs import QuantSpec
from tests.support.tiny import TINY, bundle


def split(name: str, chips: int) -> tuple[Lowered, Shards, tuple[Stream, ...]]:
    low = lower(fuse_graph(bundle(name).prefill), ParameterTable(bundle(name).tensors, QuantSpec(), keep=True))
    shards = Shards(chips)
    return low, shards, partition(low, shards)


def weights(stream: Stream) -> list[Weight]:
    return [call.weight for call in stream.calls if hasattr(call, "weight")]


def test_shares_cover_everything_in_whole_units() -> None:
    assert shares(96, 2, 16) == ((0, 48), (48, 96))
    assert shares(3, 2) == ((0, 2), (2, 3))
    assert shares(40, 2, 16) == ((0, 32), (32, 40))
    assert shares(5, 1, 16) == ((0, 5),)


@pytest.mark.parametrize("name", TINY)
def test_one_chip_keeps_the_calls_and_every_tensor(name: str) -> None:
    low, shards, (only,) = split(name, 1)
    assert only.calls == low.calls
    assert {piece.source for piece in shards.pieces(0).values()} >= {weight.tensor for weight in weights(only)}
    assert all(not piece.rows for piece in shards.pieces(0).values())


@pytest.mark.parametrize("name", TINY)
def test_rows_of_every_split_weight_are_on_exactly_one_chip(name: str) -> None:
    low, shards, _streams = split(name, 2)
    whole = {weight.tensor: weight for weight in weights(Stream(low.calls, low.widths))}
    embedding = whole[next(iter(whole))].tensor
    rows: dict[str, Counter[int]] = {}
    for chip in range(2):
        for piece in shards.pieces(chip).values():
            if piece.source in whole and piece.rows:
                rows.setdefault(piece.source, Counter()).update(r for begin, end in piece.rows for r in range(begin, end))
    assert rows.keys() >= whole.keys() - {embedding}
    for tensor, held in rows.items():
        assert held == Counter(range(whole[tensor].n)), tensor
    assert embedding in shards.pieces(0)
    assert embedding not in shards.pieces(1)


@pytest.mark.parametrize("name", TINY)
def test_chips_share_heads_and_meet_at_the_same_points(name: str) -> None:
    low, _, streams = split(name, 2)
    syncs = [[call.sync for call in stream.calls if isinstance(call, AllGather)] for stream in streams]
    assert syncs[0] == syncs[1]
    assert len(set(syncs[0])) == len(syncs[0])
    whole = next(call for call in low.calls if isinstance(call, Attention))
    own = [next(call for call in stream.calls if isinstance(call, Attention)) for stream in streams]
    assert sum(call.kv_heads for call in own) == whole.kv_heads
    assert sum(call.heads for call in own) == whole.heads
    heads = [next(call for call in stream.calls if isinstance(call, LmHead)) for stream in streams]
    assert heads[1].first == heads[0].weight.n


@pytest.mark.parametrize("name", TINY)
def test_every_buffer_a_chip_reads_was_written_by_it_and_has_a_width(name: str) -> None:
    _, _, streams = split(name, 2)
    names = [set(stream.widths) for stream in streams]
    assert not names[0] & names[1]
    for stream in streams:
        assert set(lifetimes(stream.calls)) == set(stream.widths)
        written: set[str] = set()
        for call in stream.calls:
            reads = [getattr(call, field, None) for field in ("x", "qkv", "table")]
            assert all(name in written for name in reads if name is not None)
            written.update(name for name in [getattr(call, "out", None)] if name is not None)


@pytest.mark.parametrize("name", TINY)
def test_a_projection_of_heads_takes_their_rows(name: str) -> None:
    _, shards, streams = split(name, 2)
    for chip, stream in enumerate(streams):
        qkv = next(call for call in stream.calls if isinstance(call, NormLinear) and call.gated is None)
        rope = next(call for call in stream.calls if isinstance(call, QkNormRopeKv))
        piece = shards.pieces(chip)[qkv.weight.tensor]
        assert [end - begin for begin, end in piece.rows] == [rope.heads * rope.head_dim, *[rope.kv_heads * rope.head_dim] * 2]


def test_more_chips_than_kv_heads_are_refused() -> None:
    low = lower(fuse_graph(bundle(TINY[0]).prefill), ParameterTable(bundle(TINY[0]).tensors, QuantSpec(), keep=True))
    with pytest.raises(UnsupportedError, match="KV heads"):
        partition(low, Shards(low.kv.heads + 1))
