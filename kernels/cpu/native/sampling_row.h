// One row of logits: its largest element, the mass of its tokens, and the draw of one.
//
// The weight of a token is exp(x / temperature - largest / temperature) in float32, summed in fixed point (see
// sampling_lanes.h), so that a running sum does not depend on how the row was cut.
#pragma once

#include <cmath>

#include "sampling_select.h"

namespace tandem {

struct Largest {
    float value;
    int64_t token_id;  // the lowest among equals
};

template <class T>
Largest find_largest(const T *x, int64_t count) {
    constexpr int64_t kBlock = 1024;
    float largest = kLowest;
    int64_t block = 0;
    for (int64_t start = 0; start < count; start += kBlock) {
        int64_t end = std::min(count, start + kBlock), i = start;
        Vec most[4] = {splat(kLowest), splat(kLowest), splat(kLowest), splat(kLowest)};
        for (; i + 4 * kLanes <= end; i += 4 * kLanes)
            for (int j = 0; j < 4; ++j) most[j] = max(load(x + i + j * kLanes), most[j]);  // a NaN keeps most
        for (; i < end; i += kLanes) {
            int n = static_cast<int>(std::min<int64_t>(end - i, kLanes));
            most[0] = max(select_first(n, load(x + i, n), splat(kLowest)), most[0]);
        }
        float found = std::min(lane_max(max(max(most[0], most[1]), max(most[2], most[3]))), kHighest);
        if (found > largest) {
            largest = found;
            block = start;
        }
    }
    for (int64_t i = block; i < count; i += kLanes) {
        int n = static_cast<int>(std::min<int64_t>(count - i, kLanes));
        LaneBits found = equal(finite(load(x + i, n)), splat(largest)) & first_bits(n);
        if (found) return {largest, i + __builtin_ctz(found)};
    }
    return {largest, 0};  // not reached: a row has at least one element
}

// A row as the draw sees it. Both divisions round alike, so the largest token has weight 1.
template <class T>
class Scaled {
  public:
    Scaled(const T *x, float largest, float temperature)
        : x_(x), temperature_(splat(temperature)), is_scaled_(temperature != 1.0f) {
        largest_ = is_scaled_ ? finite(largest / temperature) : largest;
    }

    Vec value(int64_t i, int n) const {
        Vec x = finite(load(x_ + i, n));
        return is_scaled_ ? finite(x / temperature_) : x;
    }
    // Lanes from n on have weight 0.
    Vec weight(int64_t i, int n) const {
        return select_first(n, exp(value(i, n) - splat(largest_)), zero());
    }
    float largest() const { return largest_; }

  private:
    const T *x_;
    Vec temperature_;
    bool is_scaled_;
    float largest_;
};

template <class T>
int64_t mass(const Scaled<T> &row, int64_t start, int64_t end) {
    FixedSum sum;
    int64_t i = start;
    for (; i + kLanes <= end; i += kLanes) sum.add(row.weight(i, kLanes));
    if (i < end) sum.add(row.weight(i, static_cast<int>(end - i)));
    return sum.total();
}

// floor(u * whole) for u = random / 2^53; less than `whole`.
inline int64_t target_of(uint64_t random, int64_t whole) {
    return static_cast<int64_t>((static_cast<unsigned __int128>(random) * static_cast<uint64_t>(whole)) >> 53);
}

// The first index at which the running sum exceeds `target`.
inline int64_t first_beyond(const int64_t *weights, int64_t num, int64_t target) {
    int64_t i = 0;
    while (i < num - 1 && (target -= weights[i]) >= 0) ++i;
    return i;
}

constexpr int64_t kDrawBlock = 512;

// A token in proportion to its weight. sums: [ceil(count / kDrawBlock)]
template <class T>
int64_t draw(const Scaled<T> &row, int64_t count, uint64_t random, int64_t *sums) {
    int64_t num_blocks = 0, whole = 0;
    for (int64_t start = 0; start < count; start += kDrawBlock)
        whole += sums[num_blocks++] = mass(row, start, std::min(count, start + kDrawBlock));
    int64_t target = target_of(random, whole);
    int64_t block = first_beyond(sums, num_blocks, target);
    for (int64_t before = 0; before < block; ++before) target -= sums[before];
    int64_t start = block * kDrawBlock, end = std::min(count, start + kDrawBlock);
    alignas(64) int64_t weights[kDrawBlock + kLanes];
    for (int64_t i = start; i < end; i += kLanes)
        store_fixed(weights + i - start, row.weight(i, static_cast<int>(std::min<int64_t>(end - i, kLanes))));
    return start + first_beyond(weights, end - start, target);
}

}  // namespace tandem
