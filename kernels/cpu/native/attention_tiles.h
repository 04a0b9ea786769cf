// Paged attention in bfloat16 on matrix tiles (AMX). See attention.cpp for the method.
#pragma once

#if defined(__AMX_BF16__)

#include "amx.h"
#include "attention.h"
#include "simd.h"

namespace tandem {
namespace attention_tiles {

constexpr int64_t kStrip = 16;               // positions of one tile of K
constexpr int64_t kPair = 32;                // positions of one tile of V, and of one step of P V
constexpr int64_t kStrips = kKvTile / kStrip;
constexpr int64_t kRows = 16;                // query rows of one tile
constexpr float kHeadroom = 8.0f;            // how far, in powers of two, scores may rise above the stored maximum
constexpr float kLog2E = 1.44269504088896341f;

// 2^x, relative error below 3e-6 (2^-9 is what P loses as bfloat16); exactly 0 for -inf.
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
    const char *packed_v;
    bool is_masked;  // some row does not see all of them
};

// One thread's state of one piece.
class PieceOnTiles {
  public:
    PieceOnTiles(const Attention &a, Worker &worker) : a_(a), width_((a.head_dim + 31) & ~int64_t{31}) {
        is_direct_ = a.block_size % kStrip == 0 && width_ == a.head_dim;
        int64_t rows = (a.query_block * a.group() + kRows - 1) & ~(kRows - 1);
        // Twice: a dry pass to learn the size.
        int64_t bytes = carve(Carver(nullptr), rows);
        carve(Carver(worker.scratch(bytes)), rows);
    }

    void run(const Piece &piece) {
        piece_ = piece;
        rows_ = piece.tokens * a_.group();
        is_narrow_ = rows_ <= kRows;
        use_shapes();
        load_query();
        int64_t first_tile = a_.first_seen(piece.first_position) / kKvTile;
        int64_t last_tile = piece.last_position() / kKvTile;
        for (int64_t tile = first_tile; tile <= last_tile; ++tile) {
            start_ = tile * kKvTile;
            packed_v_ = packed_vs_ + tile % 3 * kKvTile * width_ * 2;  // three: those of jobs under way
            visit_tile();
        }
        drain();
        finish();
    }

  private:
    int64_t carve(Carver carver, int64_t rows) {
        query_ = carver.take<bf16>(rows * width_);
        query_pairs_ = carver.take<uint32_t>(kRows * width_ / 2);
        for (int slot : {0, 1}) {
            all_scores_[slot] = carver.take<float>(kRows * kKvTile);
            all_weights_[slot] = carver.take<bf16>(kRows * kKvTile);
        }
        turned_ = carver.take<float>(kStrips * kStrip * kRows);
        packed_k_ = carver.take<char>(kKvTile * width_ * 2);
        packed_vs_ = carver.take<char>(3 * kKvTile * width_ * 2);
        copied_k_ = carver.take<bf16>(kKvTile * width_);
        copied_v_ = carver.take<bf16>(kKvTile * width_);
        sums_ = carver.take<float>(rows * width_);
        totals_ = carver.take<float>(rows * 16);
        maxima_ = carver.take<float>(rows);
        return reinterpret_cast<char *>(carver.take<char>(0)) - static_cast<char *>(nullptr);
    }

    // Tiles 0 to 3: sums of 16 rows; 4: rows of Q or P; 6 and 7: K or V. Narrow pieces: 5 holds turned scores, 6 K (and
    // V), 7 Q in pairs.
    void use_shapes() {
        int64_t rows = std::min(rows_, kRows);
        columns_ = (rows + 3) & ~int64_t{3};
        if (shaped_ == rows_ || (shaped_ > kRows && rows_ > kRows)) return;
        shaped_ = rows_;
        TileShapes shapes;
        for (int tile : {0, 1, 2, 3, 4}) shapes.set(tile, static_cast<int>(rows), 64);
        shapes.set(6, 16, 64);
        int bytes = is_narrow_ ? static_cast<int>(columns_ * 4) : 64;
        for (int tile : {5, 7}) shapes.set(tile, 16, bytes);
        shapes.use();
    }

    void load_query() {
        int64_t group = a_.group(), padded = (rows_ + kRows - 1) & ~(kRows - 1);
        const bf16 *from = reinterpret_cast<const bf16 *>(a_.query) +
                           (piece_.first_token * a_.num_heads + piece_.head * group) * a_.head_dim;
        if (width_ != a_.head_dim || padded != rows_) memset(query_, 0, padded * width_ * 2);
        for (int64_t row = 0; row < rows_; ++row)
            memcpy(query_ + row * width_, from + (row / group * a_.num_heads + row % group) * a_.head_dim,
                   a_.head_dim * 2);
        if (is_narrow_) {
            auto dwords = reinterpret_cast<const uint32_t *>(query_);
            for (int64_t pair = 0; pair < width_ / 2; ++pair)
                for (int64_t row = 0; row < columns_; ++row)
                    query_pairs_[pair * columns_ + row] = dwords[row * (width_ / 2) + pair];
        }
        memset(sums_, 0, padded * width_ * sizeof(float));
        memset(totals_, 0, padded * 16 * sizeof(float));
        std::fill(maxima_, maxima_ + padded, kNoMaximum);
    }

    void visit_tile() {
        int64_t first = std::max(a_.first_seen(piece_.first_position) - start_, int64_t{0}) / kPair;
        int64_t last = std::min(piece_.last_position() - start_, kKvTile - 1) / kPair + 1;
        find_strips(2 * first, 2 * last);
        for (int64_t pair = first; pair < last; ++pair) {
            prefetch(2 * pair);
            prefetch(2 * pair + 1);
            if (!is_narrow_) {
                pack_keys(2 * pair);
                pack_keys(2 * pair + 1);
            }
            pack_values(pair);
        }
        int64_t group = a_.group();
        for (int64_t row = 0; row < rows_; row += kRows) {
            int64_t rows = std::min(rows_ - row, kRows);
            // Positions of the first and the last row.
            int64_t low = piece_.first_position + row / group, high = piece_.first_position + (row + rows - 1) / group;
            if (high < start_ || a_.first_seen(low) >= start_ + kKvTile) continue;
            int64_t begin = std::max(a_.first_seen(low) - start_, int64_t{0}) / kPair;
            int64_t end = std::min(high - start_, kKvTile - 1) / kPair + 1;
            bool is_masked = start_ + 32 * end - 1 > low || a_.first_seen(high) > start_ + 32 * begin;
            advance({row, rows, begin, end, start_, packed_v_, is_masked});
        }
    }

    // Matrix units and vectors work at the same time if they have different jobs, and what one stores has left for the
    // cache when the other loads it (tiles do not see stores in flight): score one job, weigh the one before, add the
    // values of the one before that.
    void advance(const Job &job) {
        slot_ ^= 1;
        if (is_narrow_)
            score_turned(2 * job.begin, 2 * job.end);
        else
            score(job.row, 2 * job.begin, 2 * job.end);
        if (num_jobs_ > 1) add_values(jobs_[slot_], slot_);
        if (num_jobs_ > 0) weigh(jobs_[slot_ ^ 1], slot_ ^ 1);
        jobs_[slot_] = job;
        ++num_jobs_;
    }

    void drain() {
        if (num_jobs_ > 1) add_values(jobs_[slot_ ^ 1], slot_ ^ 1);
        weigh(jobs_[slot_], slot_);
        add_values(jobs_[slot_], slot_);
        num_jobs_ = 0;
    }

    // Where the tile's strips of 16 positions lie; what next tile's prefetches should fetch.
    void find_strips(int64_t first, int64_t last) {
        int64_t row_bytes = a_.head_dim * 2;
        for (int64_t strip = first; strip < last; ++strip) {
            int64_t position = start_ + strip * kStrip;
            valid_[strip] = std::min(std::max(piece_.context - position, int64_t{0}), kStrip);
            if (is_direct_) {
                place_[strip] = valid_[strip] ? place_of(a_, piece_, position, row_bytes)
                                              : Place{reinterpret_cast<char *>(copied_k_), nullptr};
                continue;
            }
            bf16 *k = copied_k_ + strip * kStrip * width_, *v = copied_v_ + strip * kStrip * width_;
            memset(k, 0, kStrip * width_ * 2);
            memset(v, 0, kStrip * width_ * 2);
            for (int64_t i = 0; i < valid_[strip]; ++i) {
                Place place = place_of(a_, piece_, position + i, row_bytes);
                memcpy(k + i * width_, place.k, row_bytes);
                memcpy(v + i * width_, place.v, row_bytes);
            }
            place_[strip] = {reinterpret_cast<char *>(k), reinterpret_cast<char *>(v)};
        }
    }

    void prefetch(int64_t strip) {
        int64_t position = start_ + kKvTile + strip * kStrip;
        if (position > piece_.last_position() || !is_direct_) return;
        Place place = place_of(a_, piece_, position, a_.head_dim * 2);
        for (int64_t line = 0; line < kStrip * a_.head_dim * 2; line += 64) {
            _mm_prefetch(place.k + line, _MM_HINT_T0);
            _mm_prefetch(place.v + line, _MM_HINT_T0);
        }
    }

    // K of 16 positions as [steps of 32][16 pairs][16 positions][2].
    void pack_keys(int64_t strip) {
        char *to = packed_k_ + strip * kStrip * width_ * 2;
        const char *from = place_[strip].k;
        for (int64_t dwords = 0; dwords < width_ / 2; dwords += 4) {
            __m512i columns[4];
            transpose(from + dwords * 4, width_ * 2, columns);
            for (int i = 0; i < 4; ++i) _mm512_store_si512(to + (dwords + i) * 64, columns[i]);
        }
    }

    // V of 32 positions as [steps of 32 dims][2 tiles][16 pairs of positions][16 dims][2]. The dims of a step are not in
    // order: what unpacking puts into the low tile is 0-3, 8-11, 16-19, 24-27. `finish` puts the sums in order.
    void pack_values(int64_t pair) {
        char *to = packed_v_ + pair * kPair * width_ * 2;
        for (int64_t half = 0; half < 2; ++half) {
            int64_t strip = 2 * pair + half, valid = valid_[strip];
            const char *from = place_[strip].v;
            for (int64_t i = 0; i < kStrip; i += 2) {
                char *at = to + (half * 8 + i / 2) * 64;
                for (int64_t step = 0; step < width_ / 32; ++step) {
                    const char *row = from + i * width_ * 2 + step * 64;
                    __m512i upper = i < valid ? _mm512_loadu_si512(row) : _mm512_setzero_si512();
                    __m512i lower = i + 1 < valid ? _mm512_loadu_si512(row + width_ * 2) : _mm512_setzero_si512();
                    _mm512_store_si512(at + step * 2048, _mm512_unpacklo_epi16(upper, lower));
                    _mm512_store_si512(at + step * 2048 + 1024, _mm512_unpackhi_epi16(upper, lower));
                }
            }
        }
    }

    // scores[row][position] = q k for 16 rows and up to four strips at a time.
    void score(int64_t row, int64_t first, int64_t last) {
        int64_t strip = first;
        for (; strip + 4 <= last; strip += 4) score_strips<4>(row, strip);
        if (strip < last) score_strips<2>(row, strip);
    }

    template <int kCount>
    void score_strips(int64_t row, int64_t strip) {
        const bf16 *q = query_ + row * width_;
        int64_t stride = width_ * 2, strip_bytes = kStrip * width_ * 2;
        const char *k = packed_k_ + strip * strip_bytes;
        float *to = all_scores_[slot_] + strip * kStrip;
        _tile_zero(0);
        _tile_zero(1);
        if (kCount > 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t step = 0; step < width_ / 32; ++step) {
            _tile_loadd(4, q + step * 32, stride);
            _tile_loadd(6, k + step * 1024, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, k + strip_bytes + step * 1024, 64);
            _tile_dpbf16ps(1, 4, 7);
            if (kCount > 2) {
                _tile_loadd(6, k + 2 * strip_bytes + step * 1024, 64);
                _tile_dpbf16ps(2, 4, 6);
                _tile_loadd(7, k + 3 * strip_bytes + step * 1024, 64);
                _tile_dpbf16ps(3, 4, 7);
            }
        }
        _tile_stored(0, to, kKvTile * 4);
        _tile_stored(1, to + 16, kKvTile * 4);
        if (kCount > 2) {
            _tile_stored(2, to + 32, kKvTile * 4);
            _tile_stored(3, to + 48, kKvTile * 4);
        }
    }

    // The same scores, with K as it lies in the cache times Q in pairs: cheaper for one tile of rows, and the same bits,
    // because each is the same chain of products.
    void score_turned(int64_t first, int64_t last) {
        int64_t stride = columns_ * 4;
        for (int64_t strip = first; strip < last; ++strip) {
            _tile_zero(5);
            for (int64_t step = 0; step < width_ / 32; ++step) {
                _tile_loadd(6, place_[strip].k + step * 64, width_ * 2);
                _tile_loadd(7, query_pairs_ + step * 16 * columns_, stride);
                _tile_dpbf16ps(5, 6, 7);
            }
            _tile_stored(5, turned_ + strip * kStrip * columns_, stride);
        }
        for (int64_t strip = first; strip < last; ++strip) {
            const char *from = reinterpret_cast<const char *>(turned_ + strip * kStrip * columns_);
            for (int64_t row = 0; row < columns_; row += 4) {
                __m512i rows[4];
                transpose(from + row * 4, stride, rows);
                for (int i = 0; i < 4; ++i)
                    _mm512_store_si512(all_scores_[slot_] + (row + i) * kKvTile + strip * kStrip, rows[i]);
            }
        }
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

    // -inf for what a row does not see.
    void mask(const Job &job, float *scores) {
        for (int64_t i = 0; i < job.rows; ++i) {
            int64_t position = piece_.first_position + (job.row + i) / a_.group();
            int64_t seen_from = a_.first_seen(position) - job.start, seen_to = position + 1 - job.start;
            for (int64_t strip = 2 * job.begin; strip < 2 * job.end; ++strip) {
                auto below = [&](int64_t n) {
                    return first(static_cast<int>(std::min(std::max(n - strip * kStrip, int64_t{0}), kStrip)));
                };
                auto hidden = static_cast<__mmask16>(~(below(seen_to) & ~below(seen_from)));
                float *at = scores + i * kKvTile + strip * kStrip;
                _mm512_mask_store_ps(at, hidden, _mm512_set1_ps(-std::numeric_limits<float>::infinity()));
            }
        }
    }

    float unit() const { return a_.softcap != 0 ? kLog2E : kLog2E * a_.scale; }

    // P and its sums from the scores of 16 rows.
    void weigh(const Job &job, int slot) {
        float *scores = all_scores_[slot];
        bf16 *weights = all_weights_[slot];
        if (a_.softcap != 0) cap(job, scores);
        if (job.is_masked) mask(job, scores);
        if (job.begin == 0 && job.end == kKvTile / kPair)
            weigh_strips(job.row, job.rows, 0, kStrips, scores, weights);
        else
            weigh_strips(job.row, job.rows, 2 * job.begin, 2 * job.end, scores, weights);
    }

    // The stored maximum follows only when scores rise 2^kHeadroom above it: P stays far from overflow, and sums are
    // rarely rescaled.
    __attribute__((always_inline)) void weigh_strips(int64_t row, int64_t rows, int64_t first, int64_t last,
                                                     const float *scores, bf16 *weights) {
        float unit = this->unit(), headroom = kHeadroom / unit;
        __m512 units = _mm512_set1_ps(unit);
        float *maxima = maxima_ + row, *totals = totals_ + row * 16;
        for (int64_t i = 0; i < rows; ++i, scores += kKvTile, weights += kKvTile, totals += 16) {
            __m512 largest = _mm512_load_ps(scores + first * kStrip);
            for (int64_t strip = first + 1; strip < last; ++strip)
                largest = _mm512_max_ps(largest, _mm512_load_ps(scores + strip * kStrip));
            if (_mm512_cmp_ps_mask(largest, _mm512_set1_ps(maxima[i] + headroom), _CMP_GT_OQ))
                raise(row + i, _mm512_reduce_max_ps(largest));
            __m512 offset = _mm512_set1_ps(-maxima[i] * unit), total = _mm512_setzero_ps();
            for (int64_t strip = first; strip < last; strip += 2) {
                __m512 p = exp2(_mm512_fmadd_ps(_mm512_load_ps(scores + strip * kStrip), units, offset));
                __m512 r = exp2(_mm512_fmadd_ps(_mm512_load_ps(scores + (strip + 1) * kStrip), units, offset));
                total = _mm512_add_ps(_mm512_add_ps(total, p), r);
                _mm512_store_si512(weights + strip * kStrip, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(r, p)));
            }
            _mm512_store_ps(totals, _mm512_add_ps(_mm512_load_ps(totals), total));
        }
    }

    __attribute__((noinline)) void raise(int64_t row, float maximum) {
        __m512 decay = exp2(_mm512_set1_ps((maxima_[row] - maximum) * unit()));
        maxima_[row] = maximum;
        float *total = totals_ + row * 16, *sum = sums_ + row * width_;
        _mm512_store_ps(total, _mm512_mul_ps(_mm512_load_ps(total), decay));
        for (int64_t dim = 0; dim < width_; dim += 16)
            _mm512_store_ps(sum + dim, _mm512_mul_ps(_mm512_load_ps(sum + dim), decay));
    }

    void add_values(const Job &job, int slot) {
        int64_t dim = 0;
        for (; dim + 64 <= width_; dim += 64) add_dims<4>(job, slot, dim);
        if (dim < width_) add_dims<2>(job, slot, dim);
    }

    template <int kCount>
    void add_dims(const Job &job, int slot, int64_t dim) {
        float *sum = sums_ + job.row * width_ + dim;
        const bf16 *weights = all_weights_[slot];
        int64_t stride = width_ * 4;
        _tile_loadd(0, sum, stride);
        _tile_loadd(1, sum + 16, stride);
        if (kCount > 2) {
            _tile_loadd(2, sum + 32, stride);
            _tile_loadd(3, sum + 48, stride);
        }
        for (int64_t pair = job.begin; pair < job.end; ++pair) {
            const char *v = job.packed_v + pair * kPair * width_ * 2 + dim * 64;
            _tile_loadd(4, weights + pair * kPair, kKvTile * 2);
            _tile_loadd(6, v, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(6, v + 1024, 64);
            _tile_dpbf16ps(1, 4, 6);
            if (kCount > 2) {
                _tile_loadd(6, v + 2048, 64);
                _tile_dpbf16ps(2, 4, 6);
                _tile_loadd(6, v + 3072, 64);
                _tile_dpbf16ps(3, 4, 6);
            }
        }
        _tile_stored(0, sum, stride);
        _tile_stored(1, sum + 16, stride);
        if (kCount > 2) {
            _tile_stored(2, sum + 32, stride);
            _tile_stored(3, sum + 48, stride);
        }
    }

    void finish() {
        int64_t group = a_.group();
        const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        bf16 *to = reinterpret_cast<bf16 *>(a_.out) +
                   (piece_.first_token * a_.num_heads + piece_.head * group) * a_.head_dim;
        for (int64_t row = 0; row < rows_; ++row) {
            __m512 total = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_load_ps(totals_ + row * 16)));
            bf16 *out = to + (row / group * a_.num_heads + row % group) * a_.head_dim;
            for (int64_t dim = 0; dim < a_.head_dim; dim += 32) {
                const float *sum = sums_ + row * width_ + dim;
                __m512 even = _mm512_load_ps(sum), odd = _mm512_load_ps(sum + 16);
                __m512 parts[2] = {_mm512_permutex2var_ps(even, low, odd), _mm512_permutex2var_ps(even, high, odd)};
                for (int i = 0; i < 2; ++i) {
                    int count = static_cast<int>(std::min<int64_t>(a_.head_dim - dim - 16 * i, 16));
                    // + 0: a zero's sign may depend on which masked tiles were visited.
                    Vec result{_mm512_add_ps(_mm512_div_ps(parts[i], total), _mm512_setzero_ps())};
                    if (count > 0) store(out + dim + 16 * i, result, count);
                }
            }
        }
    }

    const Attention &a_;
    const int64_t width_;  // head_dim in whole steps of 32
    bool is_direct_;       // K and V can be read where they lie
    Piece piece_;
    int64_t rows_, columns_, start_, shaped_ = -1;
    bool is_narrow_;  // one tile of rows
    Place place_[kStrips];
    int64_t valid_[kStrips];  // positions of a strip inside the context
    Job jobs_[2];    // the two before the one that is scored
    int slot_ = 0;   // of the latest job
    int64_t num_jobs_ = 0;
    float *all_scores_[2];
    bf16 *all_weights_[2];
    bf16 *query_, *copied_k_, *copied_v_;
    uint32_t *query_pairs_;
    float *turned_, *sums_, *totals_, *maxima_;
    char *packed_k_, *packed_v_, *packed_vs_;
};

}  // namespace attention_tiles
}  // namespace tandem

#endif
