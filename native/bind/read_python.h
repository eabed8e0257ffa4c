// Reads Python values into preallocated arrays; every count is checked before anything is written.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "calstack/device.h"

namespace calstack::bind {

// Copies a sequence or buffer of integers into `out`; returns how many. Throws BoundError naming `what` when there are more
// than `room` or one does not fit 32 bits.
int read_ints(nanobind::handle values, int32_t* out, int room, const char* what);

// Copies a contiguous buffer of exactly `count` elements of 4 bytes.
void read_words(nanobind::handle values, uint32_t* out, int count, const char* what);

// Fills lane `index` of a slot from a LaneInput (devices/base.py); returns bytes taken.
size_t read_lane(nanobind::handle input, Slot& slot, int index);

}  // namespace calstack::bind
