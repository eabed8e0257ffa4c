"""The bounds every device keeps: a launch that breaks one is refused at `submit`, and nothing was queued."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from calstack.calbin.manifest import Manifest, Submodel
from calstack.devices.base import LaneInput, Launch, LogitRows, TokenFrom
from calstack.errors import DeviceError, RequestError
from calstack.specs import MOST_EXTEND, Role

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["MOST_TOP_LOGPROBS", "Bounds", "check_launch", "mask_words"]

MOST_TOP_LOGPROBS = 64


def mask_words(vocab: int) -> int:
    """32-bit words of a token mask."""
    return -(-vocab // 32)


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """What launches of one loaded calbin may ask for."""

    submodels: Mapping[str, Submodel]
    vocab: int
    types: int  # segments of an encoder, 1 of a decoder
    kv_blocks: int
    block_positions: int
    late_masks: bool = False

    @classmethod
    def of(cls, manifest: Manifest, kv_blocks: int, *, late_masks: bool = False) -> Bounds:
        """Bounds of a calbin loaded with `kv_blocks` KV blocks on a device that takes late masks or not."""
        submodels = {s.key: s for s in manifest.submodels}
        encoder = manifest.model.encoder
        return cls(submodels, manifest.model.vocab, encoder.types if encoder else 1, kv_blocks, manifest.kv.block_positions, late_masks)


def check_launch(launch: Launch, bounds: Bounds, *, strict: bool = False) -> Submodel:
    """The submodel of a launch that keeps every bound.

    Args:
        launch: to be checked; its token sources are the device's to check.
        bounds: of the launch's calbin.
        strict: also check sampling values, and that no two lanes write one block.

    Raises:
        DeviceError: naming the lane and the field.
    """
    submodel = bounds.submodels.get(launch.submodel)
    if submodel is None:
        raise DeviceError(f"has no submodel {launch.submodel!r}", where="launch", remedy=f"it has {', '.join(bounds.submodels)}")
    if len(launch.lanes) > submodel.batch:
        raise DeviceError(f"{len(launch.lanes)} lanes, {submodel.key} has {submodel.batch}", where="launch", remedy="use a larger batch")
    rows = 0
    for index, lane in enumerate(launch.lanes):
        if lane.cur_len != 0:
            rows += _check_lane(index, lane, submodel, bounds)
            if strict:
                _check_sampling(index, lane, bounds.vocab)
    if not 0 < rows <= submodel.rows:
        raise DeviceError(f"{rows} rows, {submodel.key} takes 1 to {submodel.rows}", where="launch", remedy="split or fill the launch")
    if strict and submodel.role is not Role.ENCODE:
        _check_writers(launch.lanes, bounds.block_positions)
    return submodel


def _refuse(index: int, what: str) -> NoReturn:
    raise DeviceError(what, where=f"lane {index}", remedy="see devices/base.py: LaneInput")


def _check_lane(index: int, lane: LaneInput, submodel: Submodel, bounds: Bounds) -> int:
    if lane.past_len < 0 or not 0 < lane.cur_len <= submodel.q_len:
        _refuse(index, f"past_len {lane.past_len} and cur_len {lane.cur_len}: at most {submodel.q_len} positions are added")
    end = lane.past_len + lane.cur_len
    if end > submodel.context:
        _refuse(index, f"{end} positions, {submodel.key} holds {submodel.context}")
    if lane.adapter != 0:
        _refuse(index, f"adapter {lane.adapter}: the calbin has no adapter slots")
    if submodel.role is Role.ENCODE:
        return _check_text(index, lane, bounds)
    _check_blocks(index, lane.blocks, -(-end // bounds.block_positions), bounds.kv_blocks)
    _check_tokens(index, lane, bounds.vocab)
    if lane.emit:
        _check_emit(index, lane, submodel, bounds)
    return lane.cur_len


def _check_text(index: int, lane: LaneInput, bounds: Bounds) -> int:
    if lane.past_len or len(lane.blocks) or lane.emit or lane.logits != LogitRows.NONE or isinstance(lane.tokens, TokenFrom):
        _refuse(index, "an encoder takes whole texts from the host, without KV blocks, and samples nothing")
    _check_tokens(index, lane, bounds.vocab)
    if len(lane.types) not in {0, lane.cur_len}:
        _refuse(index, f"{len(lane.types)} types, cur_len is {lane.cur_len}")
    if len(lane.types) and (min(lane.types) < 0 or max(lane.types) >= bounds.types):
        _refuse(index, f"a type lies outside the {bounds.types} segments of the model")
    return lane.cur_len


def _check_blocks(index: int, blocks: Sequence[int], needed: int, kv_blocks: int) -> None:
    if len(blocks) < needed:
        _refuse(index, f"{len(blocks)} blocks, its positions need {needed}")
    low, high = _extremes(blocks)
    if low < 0 or high >= kv_blocks:
        _refuse(index, f"block {low if low < 0 else high} does not exist, there are {kv_blocks}")


def _check_tokens(index: int, lane: LaneInput, vocab: int) -> None:
    if isinstance(lane.tokens, TokenFrom):
        if lane.cur_len != 1:
            _refuse(index, f"the token of an earlier launch is one row, cur_len is {lane.cur_len}")
        return
    if len(lane.tokens) != lane.cur_len:
        _refuse(index, f"{len(lane.tokens)} tokens, cur_len is {lane.cur_len}")
    _check_ids(index, "token", lane.tokens, vocab)


def _check_ids(index: int, what: str, ids: Sequence[int], vocab: int) -> None:
    if not len(ids):
        return
    low, high = _extremes(ids)
    if low < 0 or high >= vocab:
        _refuse(index, f"{what} {low if low < 0 else high} lies outside the vocabulary of {vocab}")


def _extremes(values: Sequence[int] | npt.NDArray[np.int32]) -> tuple[int, int]:
    if isinstance(values, np.ndarray):  # callers pass arrays where a sequence is asked for: ten times faster
        return int(values.min()), int(values.max())
    return min(values), max(values)


def _check_emit(index: int, lane: LaneInput, submodel: Submodel, bounds: Bounds) -> None:
    vocab = bounds.vocab
    if lane.sampling is None:
        _refuse(index, "emit needs sampling")
    if lane.draw is None and not lane.sampling.greedy:
        _refuse(index, "sampling with a temperature needs a draw key")
    if lane.top_logprobs > MOST_TOP_LOGPROBS:
        _refuse(index, f"top_logprobs {lane.top_logprobs}, at most {MOST_TOP_LOGPROBS}")
    most = MOST_EXTEND if submodel.role is Role.EXTEND else 1
    if not 0 < lane.emit_rows <= min(most, lane.cur_len):
        _refuse(index, f"emit_rows {lane.emit_rows}: {submodel.key} samples 1 to {min(most, lane.cur_len)} of its rows")
    if lane.mask is not None and not _fits(lane.mask, mask_words(vocab), lane.emit_rows):
        _refuse(index, f"the mask must be {mask_words(vocab)} contiguous 32-bit words for each of {lane.emit_rows} rows")
    if lane.late_mask and (lane.mask is not None or not bounds.late_masks or lane.emit_rows > 1):
        _refuse(index, "a late mask comes with give_mask alone, for one row, on a device with late inputs")
    if lane.sampling.needs_history:
        _check_ids(index, "history token", lane.prompt_history, vocab)
        _check_ids(index, "history token", lane.output_history, vocab)
        if len(lane.prompt_history) + len(lane.output_history) > submodel.context:
            _refuse(index, "its history is longer than the context")


def _fits(mask: npt.NDArray[np.int32], words: int, rows: int) -> bool:
    shapes = ((rows, words), (words,)) if rows == 1 else ((rows, words),)
    return mask.shape in shapes and mask.dtype.itemsize == 4 and mask.dtype.kind in "iu" and mask.flags.c_contiguous


def _check_sampling(index: int, lane: LaneInput, vocab: int) -> None:
    if lane.logits not in LogitRows.__members__.values():
        _refuse(index, f"logits {lane.logits} is not a LogitRows value")
    if lane.emit and lane.sampling is not None:
        try:
            lane.sampling.check(vocab)
        except RequestError as error:
            raise DeviceError(error.what, where=f"lane {index}", remedy="see specs.SamplingParams") from error


def _check_writers(lanes: Sequence[LaneInput], block_positions: int) -> None:
    """No two lanes write one position; lanes that check guesses write positions of one block side by side."""
    writer: dict[tuple[int, int], int] = {}
    for index, lane in enumerate(lanes):
        for position in range(lane.past_len, lane.past_len + lane.cur_len):
            block, at = lane.blocks[position // block_positions], position % block_positions
            if writer.setdefault((block, at), index) != index:
                _refuse(index, f"position {at} of block {block} is written by lane {writer[block, at]} too")
