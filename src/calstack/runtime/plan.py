"""What crosses between the engine core and the runtime: planned launches one way, their ends the other way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from calstack.devices.base import Completion, LaneInput
from calstack.errors import DeviceError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["DeviceWasReset", "LateMask", "LaunchDone", "LaunchPlan", "RuntimeEvent", "with_host_token"]


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A launch the engine wants. `id` counts up; a TokenFrom inside `lanes` holds the id of an earlier plan as its ticket.

    `known`, for the recorder: per lane the prompt ids, and the list of output ids as it grows.
    """

    id: int
    submodel: str
    lanes: tuple[LaneInput, ...]
    known: tuple[tuple[Sequence[int], Sequence[int]], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class LateMask:
    """The mask of a lane that was planned with `late_mask`; None when its token is not wanted any more."""

    plan: int
    lane: int
    mask: npt.NDArray[np.int32] | None


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchDone:
    """The end of a planned launch, in plan order: `error` is set instead of `completion` once retries are used up."""

    id: int
    completion: Completion | None
    error: DeviceError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceWasReset:
    """The device was reset: KV contents are gone and no launch planned before will end."""

    cause: DeviceError


RuntimeEvent = LaunchDone | DeviceWasReset


def with_host_token(lane: LaneInput, token: int) -> LaneInput:
    """The lane with its input token known; with a token from the device, the device would have added it to the history."""
    history = lane.output_history
    if lane.sampling is not None and lane.sampling.needs_history:
        history = (*history, token)
    return lane.with_tokens((token,), history)
