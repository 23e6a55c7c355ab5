// The distance of a result from the exact one.

#pragma once

#include <cmath>
#include <limits>

namespace infloss::bench {

// |out - exact|: 0 where both are NaN or the same infinity, and infinite, never NaN, where only one
// is a number: NaN would pass through std::max unseen.
inline double difference(double out, double exact) {
    if (out == exact || (std::isnan(out) && std::isnan(exact))) return 0;
    const double error = std::abs(out - exact);
    return std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
}

}  // namespace infloss::bench
