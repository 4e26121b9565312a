// What Python needs to keep caches of keys and values in files (../saved.py).
#pragma once
#include <nanobind/nanobind.h>

#include "decoder.h"

namespace laneformer {

void bind_saved(nanobind::module_& m, nanobind::class_<Decoder>& decoder);

}  // namespace laneformer
