// What sampling needs from vectors beyond simd.h: comparisons as bits, packing of chosen lanes, fixed-point weights.
#pragma once

#include <cstdint>
#include <limits>

#include "simd.h"

namespace tandem {

// Bit i: lane i.
using LaneBits = uint32_t;

inline LaneBits first_bits(int n) { return n >= kLanes ? (1u << kLanes) - 1 : (1u << n) - 1; }

// Weights are summed as whole multiples of 2^-42. Such sums are exact, so no order of summation can change their bits;
// 2^21 weights of at most 1 fit. A weight below 2^-43, that is, 1e-13 of the largest, counts as 0.
constexpr float kFixedOne = 4398046511104.0f;

#if defined(__AVX512F__)

// Lanes with a >= b.
inline LaneBits at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline LaneBits equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
// a where it is at least that, else 0.
inline Vec keep_at_least(Vec a, Vec least) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, least.v, _CMP_GE_OQ), a.v)};
}
inline __m512i to_fixed(__m256 x) { return _mm512_cvtps_epi64(x); }
inline void store_fixed(int64_t *p, Vec weight) {
    __m512 x = (weight * splat(kFixedOne)).v;
    _mm512_storeu_si512(p, to_fixed(_mm512_castps512_ps256(x)));
    _mm512_storeu_si512(p + 8, to_fixed(_mm512_extractf32x8_ps(x, 1)));
}
class FixedSum {
  public:
    void add(Vec weight) {
        __m512 x = (weight * splat(kFixedOne)).v;
        low_ = _mm512_add_epi64(low_, to_fixed(_mm512_castps512_ps256(x)));
        high_ = _mm512_add_epi64(high_, to_fixed(_mm512_extractf32x8_ps(x, 1)));
    }
    int64_t total() const { return _mm512_reduce_add_epi64(_mm512_add_epi64(low_, high_)); }

  private:
    __m512i low_ = _mm512_setzero_si512(), high_ = _mm512_setzero_si512();
};
// Writes the lanes of `keep`, packed, with their ids; up to kLanes places behind them are overwritten.
inline int append(float *values, int32_t *ids, Vec x, int32_t first_id, LaneBits keep) {
    __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i id = _mm512_add_epi32(_mm512_set1_epi32(first_id), lane);
    _mm512_storeu_ps(values, _mm512_maskz_compress_ps(static_cast<__mmask16>(keep), x.v));
    _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(static_cast<__mmask16>(keep), id));
    return __builtin_popcount(keep);
}

#else

#if defined(__AVX2__)

inline LaneBits at_least(Vec a, Vec b) {
    return static_cast<LaneBits>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)));
}
inline LaneBits equal(Vec a, Vec b) {
    return static_cast<LaneBits>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)));
}
inline Vec keep_at_least(Vec a, Vec least) {
    return {_mm256_and_ps(a.v, _mm256_cmp_ps(a.v, least.v, _CMP_GE_OQ))};
}
// In 1.5 * 2^52 + x the last bit of the fraction is worth 1.
inline __m256i to_fixed(__m128 x) {
    __m256d base = _mm256_set1_pd(6755399441055744.0);
    return _mm256_sub_epi64(_mm256_castpd_si256(_mm256_add_pd(_mm256_cvtps_pd(x), base)), _mm256_castpd_si256(base));
}
inline void store_fixed(int64_t *p, Vec weight) {
    __m256 x = (weight * splat(kFixedOne)).v;
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), to_fixed(_mm256_castps256_ps128(x)));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p + 4), to_fixed(_mm256_extractf128_ps(x, 1)));
}
class FixedSum {
  public:
    void add(Vec weight) {
        __m256 x = (weight * splat(kFixedOne)).v;
        low_ = _mm256_add_epi64(low_, to_fixed(_mm256_castps256_ps128(x)));
        high_ = _mm256_add_epi64(high_, to_fixed(_mm256_extractf128_ps(x, 1)));
    }
    int64_t total() const {
        int64_t lanes[4];
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(lanes), _mm256_add_epi64(low_, high_));
        return lanes[0] + lanes[1] + lanes[2] + lanes[3];
    }

  private:
    __m256i low_ = _mm256_setzero_si256(), high_ = _mm256_setzero_si256();
};

#else

inline LaneBits at_least(Vec a, Vec b) {
    LaneBits bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= static_cast<LaneBits>(a.v[i] >= b.v[i]) << i;
    return bits;
}
inline LaneBits equal(Vec a, Vec b) {
    LaneBits bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= static_cast<LaneBits>(a.v[i] == b.v[i]) << i;
    return bits;
}
inline Vec keep_at_least(Vec a, Vec least) {
    for (int i = 0; i < kLanes; ++i) a.v[i] = a.v[i] >= least.v[i] ? a.v[i] : 0.0f;
    return a;
}
// In 1.5 * 2^52 + x the last bit of the fraction is worth 1.
inline int64_t to_fixed(float x) {
    const double base = 6755399441055744.0;
    double sum = base + static_cast<double>(x);
    int64_t bits, base_bits;
    memcpy(&bits, &sum, 8);
    memcpy(&base_bits, &base, 8);
    return bits - base_bits;
}
inline void store_fixed(int64_t *p, Vec weight) {
    for (int i = 0; i < kLanes; ++i) p[i] = to_fixed(weight.v[i] * kFixedOne);
}
class FixedSum {
  public:
    void add(Vec weight) {
        for (int i = 0; i < kLanes; ++i) lanes_[i] += to_fixed(weight.v[i] * kFixedOne);
    }
    int64_t total() const {
        int64_t sum = 0;
        for (int i = 0; i < kLanes; ++i) sum += lanes_[i];
        return sum;
    }

  private:
    int64_t lanes_[kLanes] = {};
};

#endif

// Writes the lanes of `keep`, packed, with their ids; the place behind them is overwritten.
inline int append(float *values, int32_t *ids, Vec x, int32_t first_id, LaneBits keep) {
    float lanes[kLanes];
    store(lanes, x);
    int num = 0;
    for (int i = 0; i < kLanes; ++i) {
        values[num] = lanes[i];
        ids[num] = first_id + i;
        num += static_cast<int>(keep >> i & 1);
    }
    return num;
}

#endif

}  // namespace tandem
