// Paged attention on matrix tiles: the vector half. Scores of one tile of query rows become weights (P) and their sums.
#pragma once

#if defined(__AMX_BF16__)

#include <limits>

#include "attention.h"
#include "simd.h"

namespace tandem {
namespace attention_tiles {

constexpr int64_t kStrip = 16;  // positions of one tile of K, and of one vector of scores
constexpr int64_t kPair = 32;   // positions of one tile of V, and of one step of P V
constexpr int64_t kStrips = kKvTile / kStrip;
constexpr int64_t kRows = 16;       // query rows of one tile
constexpr float kHeadroom = 8.0f;   // how far, in powers of two, scores may rise above the stored maximum
constexpr float kLog2E = 1.44269504088896341f;

// 2^x, relative error below 3e-6 (P loses up to 2e-3 as bfloat16); exactly 0 for -inf.
inline __m512 exp2(__m512 x) {
    __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
    __m512 p = _mm512_set1_ps(0.013534167781472206f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.052011460065841675f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.2414427548646927f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6930038332939148f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0000026226043701f));
    return _mm512_scalef_ps(p, x);
}

// 16 rows of 4 dwords, `stride` bytes apart, to 4 vectors of 16.
inline void transpose(const char *base, int64_t stride, __m512i out[4]) {
    __m512i x[4];
    for (int t = 0; t < 4; ++t) {
        const char *row = base + t * stride;
        auto at = [&](int64_t block) {
            return _mm_loadu_si128(reinterpret_cast<const __m128i *>(row + 4 * block * stride));
        };
        x[t] = _mm512_castsi128_si512(at(0));
        x[t] = _mm512_mask_broadcast_i32x4(x[t], 0x00F0, at(1));
        x[t] = _mm512_mask_broadcast_i32x4(x[t], 0x0F00, at(2));
        x[t] = _mm512_mask_broadcast_i32x4(x[t], 0xF000, at(3));
    }
    __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
}

// One tile of query rows against one KV tile.
struct Job {
    int64_t row, rows;   // of the piece
    int64_t begin, end;  // pairs of strips of the KV tile that somebody sees
    int64_t start;       // position of the KV tile
    int64_t position, head;  // of the first row: its token's place in the sequence, its head in the group
    bool is_masked;  // some row does not see all of them
};

// What is carried from KV tile to KV tile for each row of the piece.
struct Sums {
    float *maxima;  // [rows] of the raw scores
    float *totals;  // [rows][16]: sums of the weights, lane by lane
    float *values;  // [rows][width]: sums of weighted V
    int64_t width;
};

// Turns scores into weights.
class Weigher {
  public:
    Weigher(const Attention &a, const Sums &sums)
        : a_(a), sums_(sums), unit_(a.softcap != 0 ? kLog2E : kLog2E * a.scale) {}

    void weigh(const Job &job, float *scores, bf16 *weights) {
        if (a_.softcap != 0) cap(job, scores);
        if (job.is_masked) mask(job, scores);
        if (job.begin == 0 && job.end == kKvTile / kPair)
            weigh_rows(job.row, job.rows, 0, kStrips, scores, weights);
        else
            weigh_rows(job.row, job.rows, 2 * job.begin, 2 * job.end, scores, weights);
    }

  private:
    // The stored maximum follows only when scores rise 2^kHeadroom above it: P stays far from overflow, and sums are
    // rarely rescaled.
    __attribute__((always_inline)) void weigh_rows(int64_t row, int64_t rows, int64_t first, int64_t last,
                                                   const float *scores, bf16 *weights) {
        __m512 unit = _mm512_set1_ps(unit_);
        float *maxima = sums_.maxima + row, *totals = sums_.totals + row * 16, headroom = kHeadroom / unit_;
        for (int64_t i = 0; i < rows; ++i, scores += kKvTile, weights += kKvTile, totals += 16) {
            __m512 largest = _mm512_load_ps(scores + first * kStrip);
            for (int64_t strip = first + 1; strip < last; ++strip)
                largest = _mm512_max_ps(largest, _mm512_load_ps(scores + strip * kStrip));
            if (_mm512_cmp_ps_mask(largest, _mm512_set1_ps(maxima[i] + headroom), _CMP_GT_OQ))
                raise(row + i, _mm512_reduce_max_ps(largest));
            __m512 offset = _mm512_set1_ps(-maxima[i] * unit_), sum = _mm512_setzero_ps();
            for (int64_t strip = first; strip < last; strip += 2) {
                __m512 p = exp2(_mm512_fmadd_ps(_mm512_load_ps(scores + strip * kStrip), unit, offset));
                __m512 r = exp2(_mm512_fmadd_ps(_mm512_load_ps(scores + (strip + 1) * kStrip), unit, offset));
                sum = _mm512_add_ps(sum, _mm512_add_ps(p, r));
                _mm512_store_si512(weights + strip * kStrip, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(r, p)));
            }
            _mm512_store_ps(totals, _mm512_add_ps(_mm512_load_ps(totals), sum));
        }
    }

    __attribute__((noinline)) void raise(int64_t row, float maximum) {
        __m512 decay = exp2(_mm512_set1_ps((sums_.maxima[row] - maximum) * unit_));
        float *total = sums_.totals + row * 16, *values = sums_.values + row * sums_.width;
        sums_.maxima[row] = maximum;
        _mm512_store_ps(total, _mm512_mul_ps(_mm512_load_ps(total), decay));
        for (int64_t dim = 0; dim < sums_.width; dim += 16)
            _mm512_store_ps(values + dim, _mm512_mul_ps(_mm512_load_ps(values + dim), decay));
    }

    // scores = softcap * tanh(scale * scores / softcap), from 1 - 2 / (e^2x + 1).
    void cap(const Job &job, float *scores) {
        __m512 factor = _mm512_set1_ps(2 * kLog2E * a_.scale / a_.softcap), one = _mm512_set1_ps(1);
        for (int64_t row = 0; row < job.rows; ++row)
            for (int64_t strip = 2 * job.begin; strip < 2 * job.end; ++strip) {
                float *at = scores + row * kKvTile + strip * kStrip;
                __m512 power = exp2(_mm512_mul_ps(_mm512_load_ps(at), factor));
                __m512 part = _mm512_div_ps(_mm512_set1_ps(2), _mm512_add_ps(power, one));
                _mm512_store_ps(at, _mm512_mul_ps(_mm512_set1_ps(a_.softcap), _mm512_sub_ps(one, part)));
            }
    }

    // -inf for what a row does not see: its weight is then 0, and a NaN behind the context is gone.
    void mask(const Job &job, float *scores) {
        int64_t position = job.position, head = job.head, group = a_.group();
        for (int64_t row = 0; row < job.rows; ++row) {
            int64_t seen_from = a_.first_seen(position) - job.start, seen_to = position + 1 - job.start;
            for (int64_t strip = 2 * job.begin; strip < 2 * job.end; ++strip) {
                auto below = [&](int64_t n) {
                    return first(static_cast<int>(std::min(std::max(n - strip * kStrip, int64_t{0}), kStrip)));
                };
                auto hidden = static_cast<__mmask16>(~(below(seen_to) & ~below(seen_from)));
                float *at = scores + row * kKvTile + strip * kStrip;
                _mm512_mask_store_ps(at, hidden, _mm512_set1_ps(-std::numeric_limits<float>::infinity()));
            }
            if (++head == group) {
                head = 0;
                ++position;
            }
        }
    }

    const Attention &a_;
    const Sums &sums_;
    const float unit_;  // powers of two per unit of the scores
};

}  // namespace attention_tiles
}  // namespace tandem

#endif
