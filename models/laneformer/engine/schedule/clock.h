#pragma once

namespace laneformer {

double now_s();  // of a clock that only goes forward

}  // namespace laneformer
