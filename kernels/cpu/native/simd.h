// Vectors of float32 for the instruction set that this file is compiled for. `Vec` holds kLanes of them.
//
// Every operation is one IEEE operation per lane, in the order written (build.py turns contraction off), so results do
// not depend on where a value sits. `fma` is fused on AVX2 and AVX-512 and is not in the plain form.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace tandem {

// Storage formats. Arithmetic is done in float32.
struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = uint32_t{x.bits} << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}
float to_float(fp16 x);

#if defined(__AVX512F__)

constexpr int kLanes = 16;
struct Vec {
    __m512 v;
};
inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec splat(float x) { return {_mm512_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec round_to_int(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// x * 2^n for integral n
inline Vec scale(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }
inline __mmask16 first(int n) { return n >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << n) - 1); }
// The first n lanes of a, the others of b.
inline Vec select_first(int n, Vec a, Vec b) { return {_mm512_mask_blend_ps(first(n), b.v, a.v)}; }
inline Vec load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const float *p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline void store(float *p, Vec x) { _mm512_storeu_ps(p, x.v); }
inline void store(float *p, Vec x, int n) { _mm512_mask_storeu_ps(p, first(n), x.v); }
inline Vec widen(__m256i x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))}; }
// Round to nearest even; NaN stays NaN. The BF16 instruction makes 0 of denormals.
#if defined(__AVX512BF16__)
inline __m256i narrow(Vec x) {
    __m256bh halves = _mm512_cvtneps_pbh(x.v);
    return reinterpret_cast<__m256i &>(halves);
}
#else
inline __m256i narrow(Vec x) {
    __m512i bits = _mm512_castps_si512(x.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC0));
    return _mm512_cvtepi32_epi16(rounded);
}
#endif
inline Vec load(const bf16 *p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
inline void store(bf16 *p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), narrow(x)); }
#if defined(__AVX512BF16__)
// 32 values at once: as `store`, except that denormals become 0.
inline void store_pair(bf16 *p, Vec low, Vec high) {
    __m512bh both = _mm512_cvtne2ps_pbh(high.v, low.v);
    _mm512_storeu_si512(p, reinterpret_cast<__m512i &>(both));
}
#endif
inline Vec load(const fp16 *p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))}; }
inline void store(fp16 *p, Vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
inline float to_float(fp16 x) { return _cvtsh_ss(x.bits); }
// Half onto half: written out, since a compiler may choose the order of its own reduction.
inline float lane_sum(Vec x) {
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float lane_max(Vec x) { return _mm512_reduce_max_ps(x.v); }

#elif defined(__AVX2__)

constexpr int kLanes = 8;
struct Vec {
    __m256 v;
};
inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec splat(float x) { return {_mm256_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec round_to_int(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec scale(Vec x, Vec n) {
    __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
    return {_mm256_mul_ps(x.v, _mm256_castsi256_ps(bits))};
}
inline __m256i first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec select_first(int n, Vec a, Vec b) { return {_mm256_blendv_ps(b.v, a.v, _mm256_castsi256_ps(first(n)))}; }
inline Vec load(const float *p) { return {_mm256_loadu_ps(p)}; }
inline Vec load(const float *p, int n) { return {_mm256_maskload_ps(p, first(n))}; }
inline void store(float *p, Vec x) { _mm256_storeu_ps(p, x.v); }
inline void store(float *p, Vec x, int n) { _mm256_maskstore_ps(p, first(n), x.v); }
inline Vec load(const bf16 *p) {
    __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
}
inline void store(bf16 *p, Vec x) {
    __m256i bits = _mm256_castps_si256(x.v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
    __m256 nan = _mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q);
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), _mm256_castps_si256(nan));
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_castsi256_si128(packed));
}
inline Vec load(const fp16 *p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))}; }
inline void store(fp16 *p, Vec x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
inline float to_float(fp16 x) { return _cvtsh_ss(x.bits); }
inline float lane_sum(Vec x) {
    float lanes[8];
    _mm256_storeu_ps(lanes, x.v);
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}
inline float lane_max(Vec x) {
    float lanes[8];
    _mm256_storeu_ps(lanes, x.v);
    float result = lanes[0];
    for (int i = 1; i < 8; ++i) result = lanes[i] > result ? lanes[i] : result;
    return result;
}

#else

constexpr int kLanes = 8;
struct Vec {
    float v[kLanes];
};
#define TANDEM_EACH(expression)                      \
    Vec result;                                      \
    for (int i = 0; i < kLanes; ++i) result.v[i] = (expression); \
    return result
inline Vec zero() { TANDEM_EACH(0.0f); }
inline Vec splat(float x) { TANDEM_EACH(x); }
inline Vec operator+(Vec a, Vec b) { TANDEM_EACH(a.v[i] + b.v[i]); }
inline Vec operator-(Vec a, Vec b) { TANDEM_EACH(a.v[i] - b.v[i]); }
inline Vec operator*(Vec a, Vec b) { TANDEM_EACH(a.v[i] * b.v[i]); }
inline Vec operator/(Vec a, Vec b) { TANDEM_EACH(a.v[i] / b.v[i]); }
inline Vec fma(Vec a, Vec b, Vec c) { TANDEM_EACH(a.v[i] * b.v[i] + c.v[i]); }
// As the x86 instructions: the second operand where one is NaN.
inline Vec max(Vec a, Vec b) { TANDEM_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline Vec min(Vec a, Vec b) { TANDEM_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline Vec round_to_int(Vec a) { TANDEM_EACH(__builtin_rintf(a.v[i])); }
inline Vec scale(Vec x, Vec n) {
    Vec result;
    for (int i = 0; i < kLanes; ++i) {
        uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23;
        float power;
        memcpy(&power, &bits, 4);
        result.v[i] = x.v[i] * power;
    }
    return result;
}
inline Vec select_first(int n, Vec a, Vec b) { TANDEM_EACH(i < n ? a.v[i] : b.v[i]); }
inline Vec load(const float *p) { TANDEM_EACH(p[i]); }
inline Vec load(const float *p, int n) { TANDEM_EACH(i < n ? p[i] : 0.0f); }
inline void store(float *p, Vec x) { memcpy(p, x.v, sizeof(x.v)); }
inline void store(float *p, Vec x, int n) { memcpy(p, x.v, n * sizeof(float)); }
inline float to_float(fp16 x) {
    uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, exponent = (x.bits >> 10) & 31, fraction = x.bits & 0x3FF;
    if (exponent == 0) {  // zero and subnormal: fraction * 2^-24
        float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;
        return sign ? -magnitude : magnitude;
    }
    uint32_t bits = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | (fraction << 13);
    float result;
    memcpy(&result, &bits, 4);
    return result;
}
inline uint16_t bf16_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7FC0;
    return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
inline uint16_t fp16_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000) return sign | 0x7E00;
    if (bits >= 0x477FF000) return sign | 0x7C00;  // rounds to infinity
    if (bits < 0x38800000) {                       // subnormal: let the float adder round at 2^-24
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;  // 0.5 has its last bit at 2^-24
        memcpy(&bits, &magnitude, 4);
        return sign | static_cast<uint16_t>(bits - 0x3F000000);
    }
    bits += 0xC8000FFF + ((bits >> 13) & 1);  // re-bias the exponent by -112, and round
    return sign | static_cast<uint16_t>(bits >> 13);
}
inline Vec load(const bf16 *p) { TANDEM_EACH(to_float(p[i])); }
inline void store(bf16 *p, Vec x) {
    for (int i = 0; i < kLanes; ++i) p[i].bits = bf16_bits(x.v[i]);
}
inline Vec load(const fp16 *p) { TANDEM_EACH(to_float(p[i])); }
inline void store(fp16 *p, Vec x) {
    for (int i = 0; i < kLanes; ++i) p[i].bits = fp16_bits(x.v[i]);
}
inline float lane_sum(Vec x) {
    return ((x.v[0] + x.v[4]) + (x.v[1] + x.v[5])) + ((x.v[2] + x.v[6]) + (x.v[3] + x.v[7]));
}
inline float lane_max(Vec x) {
    float result = x.v[0];
    for (int i = 1; i < kLanes; ++i) result = x.v[i] > result ? x.v[i] : result;
    return result;
}
#undef TANDEM_EACH

#endif

// A last, shorter vector of a row: lanes from n on read as 0 and are not written.
template <class T>
inline Vec load(const T *p, int n) {
    if (n >= kLanes) return load(p);
    T padded[kLanes] = {};
    memcpy(padded, p, n * sizeof(T));
    return load(padded);
}
template <class T>
inline void store(T *p, Vec x, int n) {
    if (n >= kLanes) return store(p, x);
    T padded[kLanes];
    store(padded, x);
    memcpy(p, padded, n * sizeof(T));
}

// The value as it would come back from storage.
template <class T>
inline Vec rounded_to(Vec x) {
    T stored[kLanes];
    store(stored, x);
    return load(stored);
}
template <>
inline Vec rounded_to<float>(Vec x) {
    return x;
}
#if defined(__AVX512F__)
template <>
inline Vec rounded_to<bf16>(Vec x) {
    return widen(narrow(x));
}
#endif

// e^x, relative error below 2e-7; x is clamped to [-87.3, 88] first (so e^-inf is 1e-38, not 0, and NaN is no NaN).
// Cody-Waite reduction by ln 2 in two parts, then the Taylor polynomial of degree 7 on [-ln2/2, ln2/2].
inline Vec exp(Vec x) {
    Vec clamped = min(max(x, splat(-87.3f)), splat(88.0f));
    Vec n = round_to_int(clamped * splat(1.44269504088896341f));
    Vec r = fma(n, splat(-0.693145751953125f), clamped);
    r = fma(n, splat(-1.42860677e-6f), r);
    Vec p = splat(1.0f / 5040);
    p = fma(p, r, splat(1.0f / 720));
    p = fma(p, r, splat(1.0f / 120));
    p = fma(p, r, splat(1.0f / 24));
    p = fma(p, r, splat(1.0f / 6));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
    return scale(p, n);
}

}  // namespace tandem
