#pragma once

namespace laneformer {

double now_s();  // seconds of a clock that only goes forward

}  // namespace laneformer
