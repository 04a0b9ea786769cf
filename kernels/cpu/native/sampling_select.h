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

// Ascends with x; equal for -0 and 0. Without branches, which random signs would make expensive.
inline uint32_t key_of(float x) {
    x += 0.0f;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}
inline float value_of(uint32_t key) {
    uint32_t bits = key ^ (static_cast<uint32_t>(static_cast<int32_t>(~key) >> 31) | 0x80000000u);
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// The keys of `num` floats, written in their place.
inline uint32_t *make_keys(float *values, int64_t num) {
    for (int64_t i = 0; i < num; ++i) {
        uint32_t key = key_of(values[i]);
        memcpy(values + i, &key, 4);
    }
    return reinterpret_cast<uint32_t *>(values);
}

constexpr int kBucketBits = 10;
// Neighbours go to different tables: a run of equal keys would otherwise wait for one addition after the other.
constexpr int kTables = 4;

// Memory for `select`: indices of as many elements as there may be, and the buckets.
struct SelectMemory {
    int32_t *indices;
    int64_t *buckets;  // [kTables, 2^kBucketBits]
};

struct KeyRange {
    uint32_t lowest, highest;
};

// The bucket of a key, counted from the largest key down: by the value's distance from the largest. Spreads what a
// model computes well, but not every range can be divided like this.
struct BucketsOfValues {
    float highest, scale;

    explicit BucketsOfValues(KeyRange range)
        : highest(value_of(range.highest)), scale(((1 << kBucketBits) - 1) / (highest - value_of(range.lowest))) {}
    static bool can_divide(KeyRange range) {
        float span = value_of(range.highest) - value_of(range.lowest);
        return span > 1e-30f && span < 1e30f;
    }
    uint32_t operator()(uint32_t key) const {
        return static_cast<uint32_t>(static_cast<int32_t>((highest - value_of(key)) * scale));
    }
};

// By the key's distance: each bucket has a range 2^kBucketBits times smaller.
struct BucketsOfKeys {
    uint32_t highest;
    int shift;

    explicit BucketsOfKeys(KeyRange range) : highest(range.highest), shift(0) {
        uint32_t span = range.highest - range.lowest;
        if (span >> kBucketBits) shift = 32 - __builtin_clz(span) - kBucketBits;
    }
    uint32_t operator()(uint32_t key) const { return (highest - key) >> shift; }
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
template <class BucketOf, class Index, class Weight>
int64_t narrow_down(const uint32_t *keys, int64_t num, KeyRange range, Index index_at, Weight weight, int64_t &limit,
                    const SelectMemory &memory) {
    constexpr int64_t kNumBuckets = int64_t{1} << kBucketBits, kPiece = 64;
    BucketOf bucket_of(range);
    uint32_t buckets[kPiece];
    // Calls body(j, buckets[j]) for each element; the buckets of a piece are computed by vectors.
    auto for_each = [&](auto body) {
        for (int64_t start = 0; start < num; start += kPiece) {
            int64_t count = std::min(kPiece, num - start);
            for (int64_t j = 0; j < count; ++j) buckets[j] = bucket_of(keys[index_at(start + j)]);
            for (int64_t j = 0; j < count; ++j) body(index_at(start + j), buckets[j], j);
        }
    };
    memset(memory.buckets, 0, kTables * kNumBuckets * sizeof(int64_t));
    for_each([&](int64_t index, uint32_t bucket, int64_t j) {
        memory.buckets[j % kTables * kNumBuckets + bucket] += weight(index);
    });
    uint32_t found = 0;
    for (uint32_t last = bucket_of(range.lowest); found < last; ++found) {
        int64_t sum = 0;
        for (int table = 0; table < kTables; ++table) sum += memory.buckets[table * kNumBuckets + found];
        if (sum >= limit) break;
        limit -= sum;
    }
    int64_t num_left = 0;
    for_each([&](int64_t index, uint32_t bucket, int64_t) {
        memory.indices[num_left] = static_cast<int32_t>(index);  // no branch: it would be mispredicted
        num_left += bucket == found;
    });
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
    if (BucketsOfValues::can_divide(range))
        num = narrow_down<BucketsOfValues>(keys, num, range, own, weight, limit, memory);
    else
        num = narrow_down<BucketsOfKeys>(keys, num, range, own, weight, limit, memory);
    while ((range = range_of(keys, num, listed)).lowest != range.highest)  // four rounds at most
        num = narrow_down<BucketsOfKeys>(keys, num, range, listed, weight, limit, memory);
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
    const uint32_t *keys = make_keys(maxima, num);
    return value_of(keys[select(keys, num, k, [](int64_t) { return int64_t{1}; }, memory)]);
}

}  // namespace tandem
