// The largest elements of a row, without sorting it. Elements that may be among them are gathered in the order of their
// ids ("candidates"); thresholds are then found exactly by counting keys in buckets, three times at most.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "sampling_lanes.h"

namespace tandem {

constexpr float kLowest = std::numeric_limits<float>::lowest(), kHighest = std::numeric_limits<float>::max();

// NaN counts as the lowest, infinities as the largest finite numbers: nothing that follows can make a NaN of them.
inline Vec finite(Vec x) { return min(max(x, splat(kLowest)), splat(kHighest)); }
inline float finite(float x) { return x >= kLowest ? std::min(x, kHighest) : kLowest; }

// Ascends with x; equal for -0 and 0.
inline uint32_t key_of(float x) {
    x += 0.0f;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}
inline float value_of(uint32_t key) {
    uint32_t bits = key ^ (key >> 31 ? 0x80000000u : 0xFFFFFFFFu);
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

constexpr int kBucketBits = 11;

// Memory for `select`: indices of as many elements as there may be, and the buckets.
struct SelectMemory {
    int32_t *indices;
    int64_t *buckets;  // [2^kBucketBits]
};

// The bucket of a key, counted from the largest key down.
struct Buckets {
    uint32_t highest;
    int shift;

    Buckets(uint32_t lowest, uint32_t highest) : highest(highest), shift(0) {
        uint32_t range = highest - lowest;
        if (range >> kBucketBits) shift = 32 - __builtin_clz(range) - kBucketBits;
    }
    uint32_t operator()(uint32_t key) const { return (highest - key) >> shift; }
};

// The index of the element at which, from the largest key down and by index among equals, the running sum of
// weight(index) reaches `limit`, 0 < limit <= sum of all.
template <class Weight>
int64_t select(const uint32_t *keys, int64_t num, int64_t limit, Weight weight, const SelectMemory &memory) {
    uint32_t lowest = keys[0], highest = keys[0];
    for (int64_t i = 1; i < num; ++i) {
        lowest = std::min(lowest, keys[i]);
        highest = std::max(highest, keys[i]);
    }
    int32_t *const indices = memory.indices;
    for (int round = 0;; ++round) {
        Buckets bucket_of(lowest, highest);
        memset(memory.buckets, 0, sizeof(int64_t) << kBucketBits);
        if (round == 0)
            for (int64_t i = 0; i < num; ++i) memory.buckets[bucket_of(keys[i])] += weight(i);
        else
            for (int64_t i = 0; i < num; ++i) memory.buckets[bucket_of(keys[indices[i]])] += weight(indices[i]);
        uint32_t bucket = 0, last = bucket_of(lowest);
        while (bucket < last && memory.buckets[bucket] < limit) limit -= memory.buckets[bucket++];
        uint32_t new_lowest = highest, new_highest = lowest;
        int64_t kept = 0;
        for (int64_t i = 0; i < num; ++i) {
            int32_t index = round == 0 ? static_cast<int32_t>(i) : indices[i];
            if (bucket_of(keys[index]) != bucket) continue;
            new_lowest = std::min(new_lowest, keys[index]);
            new_highest = std::max(new_highest, keys[index]);
            indices[kept++] = index;
        }
        num = kept;
        lowest = new_lowest;
        highest = new_highest;
        if (lowest == highest) break;
    }
    int64_t place = 0;
    while (place < num - 1 && (limit -= weight(indices[place])) > 0) ++place;
    return indices[place];
}

// A value that at least k elements of x reach and not many more; kLowest if that is not worth finding.
// The k-th largest of the maxima of disjoint groups is such a value. maxima: [count + kLanes] floats.
template <class T>
float bound_of_largest(const T *x, int64_t count, int64_t k, float *maxima, const SelectMemory &memory) {
    constexpr int64_t kLargestGroup = 64;
    int64_t group = std::min(kLargestGroup, count / (4 * k));
    if (group < 2) return kLowest;
    int64_t num = 0;
    for (int64_t start = 0; start < count; start += group * kLanes) {
        int64_t end = std::min(count, start + group * kLanes);
        Vec most = splat(kLowest);
        for (int64_t i = start; i < end; i += kLanes) {
            int n = static_cast<int>(std::min<int64_t>(end - i, kLanes));
            most = max(select_first(n, load(x + i, n), splat(kLowest)), most);
        }
        store(maxima + num, min(most, splat(kHighest)));
        num += kLanes;
    }
    auto keys = reinterpret_cast<uint32_t *>(maxima);
    for (int64_t i = 0; i < num; ++i) {
        uint32_t key = key_of(maxima[i]);
        memcpy(keys + i, &key, 4);
    }
    return value_of(keys[select(keys, num, k, [](int64_t) { return int64_t{1}; }, memory)]);
}

}  // namespace tandem
