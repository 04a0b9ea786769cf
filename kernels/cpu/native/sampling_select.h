// The largest elements of a row, without sorting it. Elements that may be among them are gathered in the order of their
// ids ("candidates"); thresholds are then found exactly by summing weights in buckets of keys, a few rounds at most.
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

constexpr int kBucketBits = 10;
// Neighbours go to different tables: a run of equal keys would otherwise wait for one addition after the other.
constexpr int kTables = 4;

// Memory for `select`: indices of as many elements as there may be, and the buckets.
struct SelectMemory {
    int32_t *indices;
    int64_t *buckets;  // [kTables, 2^kBucketBits]
};

// The bucket of a key, counted from the largest key down.
struct BucketOf {
    uint32_t highest;
    int shift;

    BucketOf(uint32_t lowest, uint32_t highest) : highest(highest), shift(0) {
        uint32_t range = highest - lowest;
        if (range >> kBucketBits) shift = 32 - __builtin_clz(range) - kBucketBits;
    }
    uint32_t operator()(uint32_t key) const { return (highest - key) >> shift; }
};

struct KeyRange {
    uint32_t lowest, highest;
};

template <class Index>
KeyRange range_of(const uint32_t *keys, int64_t num, Index index_at) {
    KeyRange range{keys[index_at(0)], keys[index_at(0)]};
    for (int64_t i = 1; i < num; ++i) {
        range.lowest = std::min(range.lowest, keys[index_at(i)]);
        range.highest = std::max(range.highest, keys[index_at(i)]);
    }
    return range;
}

// Of the elements index_at(0 .. num - 1): finds the bucket in which the running sum reaches `limit`, takes what lies
// before it off `limit`, and writes the bucket's indices, in their order. Returns how many there are.
template <class Index, class Weight>
int64_t narrow_down(const uint32_t *keys, int64_t num, KeyRange range, Index index_at, Weight weight, int64_t &limit,
                    const SelectMemory &memory) {
    BucketOf bucket_of(range.lowest, range.highest);
    constexpr int64_t kNumBuckets = int64_t{1} << kBucketBits;
    memset(memory.buckets, 0, kTables * kNumBuckets * sizeof(int64_t));
    for (int64_t i = 0; i < num; ++i) {
        int64_t index = index_at(i);
        memory.buckets[i % kTables * kNumBuckets + bucket_of(keys[index])] += weight(index);
    }
    uint32_t bucket = 0;
    for (uint32_t last = bucket_of(range.lowest); bucket < last; ++bucket) {
        int64_t sum = 0;
        for (int table = 0; table < kTables; ++table) sum += memory.buckets[table * kNumBuckets + bucket];
        if (sum >= limit) break;
        limit -= sum;
    }
    int64_t num_left = 0;
    for (int64_t i = 0; i < num; ++i) {
        int64_t index = index_at(i);
        memory.indices[num_left] = static_cast<int32_t>(index);  // no branch: it would be mispredicted
        num_left += bucket_of(keys[index]) == bucket;
    }
    return num_left;
}

// The index of the element at which, from the largest key down and by index among equals, the running sum of
// weight(index) reaches `limit`, 0 < limit <= sum of all.
template <class Weight>
int64_t select(const uint32_t *keys, int64_t num, int64_t limit, Weight weight, const SelectMemory &memory) {
    auto own = [](int64_t i) { return i; };
    auto listed = [indices = memory.indices](int64_t i) { return int64_t{indices[i]}; };
    auto reach = [&](auto index_at) {
        int64_t place = 0;
        while (place < num - 1 && (limit -= weight(index_at(place))) > 0) ++place;
        return index_at(place);
    };
    KeyRange range = range_of(keys, num, own);
    if (range.lowest == range.highest) return reach(own);
    num = narrow_down(keys, num, range, own, weight, limit, memory);
    // Each round leaves a range 2^kBucketBits times smaller, so there are four at most.
    while ((range = range_of(keys, num, listed)).lowest != range.highest)
        num = narrow_down(keys, num, range, listed, weight, limit, memory);
    return reach(listed);
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
