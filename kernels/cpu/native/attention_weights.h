// Paged attention on matrix tiles: the vector half. Scores of one tile of query rows become weights (P) and their sums.
#pragma once

#if defined(__AMX_BF16__)

#include <limits>

#include "attention_packing.h"

namespace tandem {
namespace attention_tiles {

constexpr float kHeadroom = 8.0f;  // how far, in powers of two, scores may rise above the stored maximum
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
    float *maxima;   // [rows] of the raw scores; they follow only when scores rise above the limits, 2^kHeadroom higher
    float *limits;   // [rows]
    float *offsets;  // [rows]: what is added to scores in powers of two
    float *totals;   // [rows][16]: sums of the weights, lane by lane
    float *values;   // [rows][width]: sums of weighted V
    int64_t width;

    void carve(Carver &carver, int64_t rows, int64_t columns) {
        maxima = carver.take<float>(rows);
        limits = carver.take<float>(rows);
        offsets = carver.take<float>(rows);
        totals = carver.take<float>(rows * 16);
        values = carver.take<float>(rows * columns);
        width = columns;
    }

    // The result of one row, in the order of dims that packing V has upset.
    void write(int64_t row, int64_t head_dim, bf16 *out) const {
        const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        __m512 factor = _mm512_set1_ps(1.0f / lane_sum({_mm512_load_ps(totals + row * 16)}));
        for (int64_t dim = 0; dim < head_dim; dim += 32) {
            const float *sum = values + row * width + dim;
            __m512 even = _mm512_load_ps(sum), odd = _mm512_load_ps(sum + 16);
            // + 0: a zero's sign may depend on which masked tiles were visited.
            auto result = [&](__m512i order) {
                return _mm512_fmadd_ps(_mm512_permutex2var_ps(even, order, odd), factor, _mm512_setzero_ps());
            };
            auto rounded = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(result(high), result(low)));
            auto kept = static_cast<__mmask16>((1ull << std::min<int64_t>((head_dim - dim) / 2, 16)) - 1);
            _mm512_mask_storeu_epi32(out + dim, kept, rounded);
        }
    }
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
            weigh_rows(job, 0, kStrips, scores, weights);
        else
            weigh_rows(job, 2 * job.begin, 2 * job.end, scores, weights);
    }

    // One row of a KV tile, from registers. What the job does not see counts as masked: adding its zeros changes no bit.
    __attribute__((always_inline)) void weigh_row(const Job &job, int64_t row, __m512 scores[kStrips], bf16 *weights) {
        if (a_.softcap != 0)
            for (int64_t strip = 0; strip < kStrips; ++strip) scores[strip] = capped(scores[strip]);
        if (job.is_masked || job.begin != 0 || job.end != kKvTile / kPair) {
            const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
            int64_t position = job.position + (job.head + row) / a_.group();
            for (int64_t strip = 0; strip < kStrips; ++strip) {
                bool is_there = strip >= 2 * job.begin && strip < 2 * job.end;
                __mmask16 hidden = is_there ? hidden_places(job, position, static_cast<int>(strip)) : 0xFFFF;
                scores[strip] = _mm512_mask_mov_ps(scores[strip], hidden, nothing);
            }
        }
        __m512 largest = _mm512_max_ps(_mm512_max_ps(scores[0], scores[1]), _mm512_max_ps(scores[2], scores[3]));
        if (_mm512_cmp_ps_mask(largest, _mm512_set1_ps(sums_.limits[row]), _CMP_GT_OQ))
            raise(row, _mm512_reduce_max_ps(largest));
        __m512 unit = _mm512_set1_ps(unit_), offset = _mm512_set1_ps(sums_.offsets[row]), sum = _mm512_setzero_ps();
        for (int64_t strip = 0; strip < kStrips; strip += 2) {
            __m512 p = exp2(_mm512_fmadd_ps(scores[strip], unit, offset));
            __m512 r = exp2(_mm512_fmadd_ps(scores[strip + 1], unit, offset));
            sum = _mm512_add_ps(sum, _mm512_add_ps(p, r));
            _mm512_store_si512(weights + strip * kStrip, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(r, p)));
        }
        float *totals = sums_.totals + row * 16;
        _mm512_store_ps(totals, _mm512_add_ps(_mm512_load_ps(totals), sum));
    }

    // Nothing seen yet.
    void clear(int64_t rows) {
        memset(sums_.values, 0, rows * sums_.width * sizeof(float));
        memset(sums_.totals, 0, rows * 16 * sizeof(float));
        for (int64_t row = 0; row < rows; ++row) set_maximum(row, kNoMaximum);
    }

  private:
    void set_maximum(int64_t row, float maximum) {
        sums_.maxima[row] = maximum;
        sums_.limits[row] = maximum + kHeadroom / unit_;
        sums_.offsets[row] = -maximum * unit_;
    }

    __attribute__((always_inline)) void weigh_rows(const Job &job, int64_t first, int64_t last, const float *scores,
                                                   bf16 *weights) {
        __m512 unit = _mm512_set1_ps(unit_);
        const float *limits = sums_.limits + job.row, *offsets = sums_.offsets + job.row;
        float *totals = sums_.totals + job.row * 16;
        for (int64_t row = 0; row < job.rows; ++row, scores += kKvTile, weights += kKvTile, totals += 16) {
            __m512 largest = _mm512_load_ps(scores + first * kStrip);
            for (int64_t strip = first + 1; strip < last; ++strip)
                largest = _mm512_max_ps(largest, _mm512_load_ps(scores + strip * kStrip));
            if (_mm512_cmp_ps_mask(largest, _mm512_set1_ps(limits[row]), _CMP_GT_OQ))
                raise(job.row + row, _mm512_reduce_max_ps(largest));
            __m512 offset = _mm512_set1_ps(offsets[row]), sum = _mm512_setzero_ps();
            for (int64_t strip = first; strip < last; strip += 2) {
                __m512 p = exp2(_mm512_fmadd_ps(_mm512_load_ps(scores + strip * kStrip), unit, offset));
                __m512 r = exp2(_mm512_fmadd_ps(_mm512_load_ps(scores + (strip + 1) * kStrip), unit, offset));
                sum = _mm512_add_ps(sum, _mm512_add_ps(p, r));
                _mm512_store_si512(weights + strip * kStrip, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(r, p)));
            }
            _mm512_store_ps(totals, _mm512_add_ps(_mm512_load_ps(totals), sum));
        }
    }

    // A new maximum; the sums so far, if any, shrink accordingly.
    __attribute__((noinline)) void raise(int64_t row, float maximum) {
        float old = sums_.maxima[row];
        set_maximum(row, maximum);
        if (old == kNoMaximum) return;
        __m512 decay = exp2(_mm512_set1_ps((old - maximum) * unit_));
        float *total = sums_.totals + row * 16, *values = sums_.values + row * sums_.width;
        _mm512_store_ps(total, _mm512_mul_ps(_mm512_load_ps(total), decay));
        for (int64_t dim = 0; dim < sums_.width; dim += 16)
            _mm512_store_ps(values + dim, _mm512_mul_ps(_mm512_load_ps(values + dim), decay));
    }

    // softcap * tanh(scale * scores / softcap), from 1 - 2 / (e^2x + 1).
    __m512 capped(__m512 scores) const {
        __m512 factor = _mm512_set1_ps(2 * kLog2E * a_.scale / a_.softcap), one = _mm512_set1_ps(1);
        __m512 power = exp2(_mm512_mul_ps(scores, factor));
        __m512 part = _mm512_div_ps(_mm512_set1_ps(2), _mm512_add_ps(power, one));
        return _mm512_mul_ps(_mm512_set1_ps(a_.softcap), _mm512_sub_ps(one, part));
    }

    void cap(const Job &job, float *scores) const {
        for (int64_t row = 0; row < job.rows; ++row)
            for (int64_t strip = 2 * job.begin; strip < 2 * job.end; ++strip) {
                float *at = scores + row * kKvTile + strip * kStrip;
                _mm512_store_ps(at, capped(_mm512_load_ps(at)));
            }
    }

    // Which positions of a strip of the KV tile a row at `position` does not see: they are before or behind what it does.
    __mmask16 hidden_places(const Job &job, int64_t position, int strip) const {
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        auto from = static_cast<int>(std::max(a_.first_seen(position) - job.start, int64_t{0}));
        auto to = static_cast<int>(position + 1 - job.start);
        __m512i places = _mm512_add_epi32(lanes, _mm512_set1_epi32(strip * static_cast<int>(kStrip)));
        return _mm512_cmp_epi32_mask(places, _mm512_set1_epi32(from), _MM_CMPINT_LT) |
               _mm512_cmp_epi32_mask(places, _mm512_set1_epi32(to), _MM_CMPINT_NLT);
    }

    // -inf for what a row does not see: its weight is then 0, and a NaN behind the context is gone.
    void mask(const Job &job, float *scores) const {
        const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
        int64_t position = job.position, head = job.head, group = a_.group();
        for (int64_t row = 0; row < job.rows; ++row, scores += kKvTile) {
            for (int strip = static_cast<int>(2 * job.begin); strip < 2 * job.end; ++strip)
                _mm512_mask_store_ps(scores + strip * kStrip, hidden_places(job, position, strip), nothing);
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
