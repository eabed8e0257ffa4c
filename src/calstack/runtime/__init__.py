"""A calbin on a device: facts, launch queue, retry and reset, flight recorder."""

from calstack.runtime.facts import CalbinFacts, Extent, SubmodelFacts
from calstack.runtime.plan import DeviceWasReset, LaunchDone, LaunchPlan, RuntimeEvent
from calstack.runtime.recorder import FlightRecorder, LaunchRecord
from calstack.runtime.runtime import Runtime, RuntimeOptions

__all__ = [
    "CalbinFacts",
    "DeviceWasReset",
    "Extent",
    "FlightRecorder",
    "LaunchDone",
    "LaunchPlan",
    "LaunchRecord",
    "Runtime",
    "RuntimeEvent",
    "RuntimeOptions",
    "SubmodelFacts",
]
