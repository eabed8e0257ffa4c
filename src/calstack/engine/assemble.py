"""Puts device, calbin, runtime and core together: the same for the engine process and for use in-process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from calstack.calbin.reader import open_calbin
from calstack.clock import Clock
from calstack.devices.base import Device
from calstack.engine.constraints import Built, ThreadedConstraints
from calstack.engine.core import Core
from calstack.engine.driver import Driver
from calstack.engine.encode import EncodeCore
from calstack.engine.options import EngineOptions
from calstack.errors import ArtifactError
from calstack.runtime.facts import CalbinFacts
from calstack.runtime.runtime import Runtime, RuntimeOptions
from calstack.wire import CalbinInfo

__all__ = ["assemble", "calbin_info", "kv_blocks_for"]


def assemble(
    device: Device,
    calbin: Path,
    *,
    options: EngineOptions | None = None,
    runtime_options: RuntimeOptions | None = None,
    kv_memory: int = 0,
    clock: Clock | None = None,
    grammars: Callable[[CalbinFacts], Built] | None = None,
) -> Driver:
    """Load a calbin on an open device, ready to serve. `kv_memory`: most bytes for KV, 0 = every lane at full context.
    `grammars`: makes the builder of grammars, called with the first one, in another thread.

    Raises:
        ArtifactError: when the calbin is damaged or does not fit the device or `kv_memory`.
    """
    facts = CalbinFacts.from_manifest(open_calbin(calbin).manifest)
    options = options or EngineOptions()
    depth = max(1, min(options.depth, device.info().queue_depth))
    late = device.info().late_inputs
    options = dataclasses.replace(options, depth=depth, late_masks=late, grammars=grammars is not None)
    if facts.encoder:
        runtime = Runtime(device, calbin, facts, kv_blocks=0, options=runtime_options, clock=clock)
        return Driver(EncodeCore(facts, options=options), runtime, clock=clock)
    blocks = kv_blocks_for(facts, device, kv_memory=kv_memory, lanes=options.max_lanes or facts.max_lanes)
    runtime = Runtime(device, calbin, facts, kv_blocks=blocks, options=runtime_options, clock=clock)
    constraints = ThreadedConstraints(lambda: grammars(facts)) if grammars is not None else None
    return Driver(Core(facts, kv_blocks=blocks, options=options), runtime, clock=clock, constraints=constraints)


def kv_blocks_for(facts: CalbinFacts, device: Device, *, kv_memory: int, lanes: int) -> int:
    """KV blocks to reserve: what all lanes can use, within `kv_memory` or half of the smallest chip's memory."""
    wanted = lanes * facts.blocks_for(facts.context)
    chips = device.info().chips
    memory = kv_memory or min((chip.dram_bytes for chip in chips), default=0) * len(chips) // 2
    blocks = min(wanted, memory // facts.bytes_per_block) if memory else wanted
    if blocks < 2:
        need = 2 * facts.bytes_per_block
        raise ArtifactError(f"{memory} bytes hold less than two KV blocks", where="kv_memory", remedy=f"give at least {need} bytes")
    return blocks


def calbin_info(driver: Driver) -> CalbinInfo:
    """What the API process must know."""
    core, facts = driver.core, driver.core.facts
    device = driver.runtime.device
    return CalbinInfo(
        calbin=facts.name,
        device=device.info().name,
        context=core.context,
        vocab=facts.vocab,
        max_lanes=core.max_lanes,
        kv_blocks=core.pool.total,
        kv_block_positions=core.pool.positions,
        submodels=tuple(sub.key for sub in facts.submodels),
        dram_total_bytes=sum(chip.total_bytes for chip in device.memory()),
    )
