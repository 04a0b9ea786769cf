// Paged attention in bfloat16 on matrix tiles (AMX). See attention.cpp for the method.
#pragma once

#if defined(__AMX_BF16__)

#include "amx.h"
#include "attention_weights.h"

namespace tandem {
namespace attention_tiles {

constexpr int kBatch = 1;          // tiles of query rows that meet a KV tile together: their sums stay in the first cache
constexpr int64_t kSpanTiles = 8;  // KV tiles that are packed together: they stay in the second cache

constexpr int64_t kSpan = kSpanTiles * kKvTile;

// One thread's state of one piece.
class PieceOnTiles {
  public:
    PieceOnTiles(const Attention &a, Worker &worker)
        : a_(a), width_((a.head_dim + 31) & ~int64_t{31}), group_(a.group()), weigher_(a, sums_) {
        is_direct_ = a.block_size % kStrip == 0 && width_ == a.head_dim;
        int64_t rows = (a.query_block * group_ + kRows - 1) & ~(kRows - 1);
        Carver measure(nullptr);
        carve(measure, rows);
        Carver carver(worker.scratch(measure.bytes()));
        carve(carver, rows);
    }

    // `next` gives the piece after this one, or null; it is asked at the last KV tile.
    template <class Next>
    void run(const Piece &piece, Next next) {
        piece_ = piece;
        rows_ = piece.tokens * group_;
        is_narrow_ = rows_ <= kRows;
        use_shapes();
        load_query();
        int64_t tile = a_.first_seen(piece.first_position) / kKvTile, end = piece.last_position() / kKvTile + 1;
        for (int64_t count; tile < end; tile += count) {
            count = std::min(end - tile, is_narrow_ ? 1 : kSpanTiles);
            start_ = tile * kKvTile;
            if (tile + count < end)
                prefetch_from(&piece_, start_ + count * kKvTile);
            else
                prefetch_from(next(), -1);
            visit_span(count);
        }
        finish();
    }

  private:
    void carve(Carver &carver, int64_t rows) {
        query_ = carver.take<bf16>(rows * width_);
        row_tiles_ = carver.take<RowTile>(rows / kRows);
        query_pairs_ = carver.take<uint32_t>(kRows * width_ / 2);
        for (int slot = 0; slot < kBatch; ++slot) {
            scores_[slot] = carver.take<float>(kRows * kKvTile);
            weights_[slot] = carver.take<bf16>(kRows * kKvTile);
        }
        turned_ = carver.take<float>(kRows * kKvTile);
        packed_k_ = carver.take<char>(kSpan * width_ * 2);
        packed_v_ = carver.take<char>(kSpan * width_ * 2);
        copied_k_ = carver.take<bf16>(kSpan * width_);
        copied_v_ = carver.take<bf16>(kSpan * width_);
        sums_.values = carver.take<float>(rows * width_);
        sums_.totals = carver.take<float>(rows * 16);
        sums_.maxima = carver.take<float>(rows);
        sums_.width = width_;
    }

    // Tiles 0 to 3: sums of 16 rows; 4: rows of P, or of Q; 6 and 7: K or V. Narrow pieces: 5 holds turned scores, 6 K or
    // V, 7 Q in pairs.
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
        int64_t padded = (rows_ + kRows - 1) & ~(kRows - 1), row_bytes = a_.head_dim * 2;
        const char *from = a_.query + (piece_.first_token * a_.num_heads + piece_.head * group_) * row_bytes;
        if (width_ != a_.head_dim || padded != rows_) memset(query_, 0, padded * width_ * 2);
        bf16 *to = query_;
        for (int64_t token = 0; token < piece_.tokens; ++token, from += a_.num_heads * row_bytes)
            for (int64_t head = 0; head < group_; ++head, to += width_) memcpy(to, from + head * row_bytes, row_bytes);
        if (is_narrow_) {
            auto dwords = reinterpret_cast<const uint32_t *>(query_);
            for (int64_t pair = 0; pair < width_ / 2; ++pair)
                for (int64_t row = 0; row < columns_; ++row)
                    query_pairs_[pair * columns_ + row] = dwords[row * (width_ / 2) + pair];
        }
        int64_t low = piece_.first_position, head = 0;
        for (int64_t row = 0; row < rows_; row += kRows) {
            int64_t last_head = head + std::min(rows_ - row, kRows) - 1, high = low + last_head / group_;
            row_tiles_[row / kRows] = {low, high, head};
            low = high + (last_head + 1) / group_ - last_head / group_;
            head = (last_head + 1) % group_;
        }
        memset(sums_.values, 0, padded * width_ * sizeof(float));
        memset(sums_.totals, 0, padded * 16 * sizeof(float));
        std::fill(sums_.maxima, sums_.maxima + padded, kNoMaximum);
    }

    // All rows against `count` KV tiles from start_ on.
    void visit_span(int64_t count) {
        int64_t first = std::max(a_.first_seen(piece_.first_position) - start_, int64_t{0}) / kPair;
        int64_t last = std::min(piece_.last_position() - start_, count * kKvTile - 1) / kPair + 1;
        find_strips(2 * first, 2 * last);
        for (int64_t pair = first; pair < last; ++pair) {
            if (!is_narrow_) {
                pack_keys(2 * pair);
                pack_keys(2 * pair + 1);
            }
            pack_values(pair);
        }
        for (int64_t row = 0; row < rows_; row += kRows * kBatch)
            for (int64_t tile = 0; tile < count; ++tile) visit_tile(row, start_ + tile * kKvTile);
    }

    // A batch of rows against one KV tile.
    //
    // Several jobs at a time, step by step, because vectors run at half their speed while matrix products are under way,
    // and what one unit has stored takes a while until the other can load it.
    void visit_tile(int64_t first_row, int64_t start) {
        Job jobs[kBatch];
        int count = 0;
        for (int64_t row = first_row; row < std::min(rows_, first_row + kRows * kBatch); row += kRows) {
            auto [low, high, head] = row_tiles_[row / kRows];
            if (high < start || a_.first_seen(low) >= start + kKvTile) continue;
            int64_t begin = std::max(a_.first_seen(low) - start, int64_t{0}) / kPair;
            int64_t end = std::min(high - start, kKvTile - 1) / kPair + 1;
            bool is_masked = start + kPair * end - 1 > low || a_.first_seen(high) > start + kPair * begin;
            jobs[count++] = {row, std::min(rows_ - row, kRows), begin, end, start, low, head, is_masked};
        }
        for (int i = 0; i < count; ++i) is_narrow_ ? score_turned(jobs[i], scores_[i]) : score(jobs[i], scores_[i]);
        for (int i = 0; i < count; ++i) weigher_.weigh(jobs[i], scores_[i], weights_[i]);
        for (int i = 0; i < count; ++i) add_values(jobs[i], weights_[i]);
    }

    // Where the tile's strips of 16 positions lie, in the cache or in a copy with whole strips and steps.
    void find_strips(int64_t first, int64_t last) {
        int64_t row_bytes = a_.head_dim * 2;
        for (int64_t strip = first; strip < last; ++strip) {
            int64_t position = start_ + strip * kStrip;
            valid_[strip] = std::min(std::max(piece_.context - position, int64_t{0}), kStrip);
            bf16 *k = copied_k_ + strip * kStrip * width_, *v = copied_v_ + strip * kStrip * width_;
            place_[strip] = {reinterpret_cast<char *>(k), reinterpret_cast<char *>(v)};
            if (is_direct_) {
                if (valid_[strip] > 0) place_[strip] = place_of(a_, piece_, position, row_bytes);
                continue;
            }
            memset(k, 0, kStrip * width_ * 2);
            memset(v, 0, kStrip * width_ * 2);
            for (int64_t i = 0; i < valid_[strip]; ++i) {
                Place place = place_of(a_, piece_, position + i, row_bytes);
                memcpy(k + i * width_, place.k, row_bytes);
                memcpy(v + i * width_, place.v, row_bytes);
            }
        }
    }

    // What to fetch while this tile is computed: the KV tile at `start`, or the first one that the piece sees.
    void prefetch_from(const Piece *piece, int64_t start) {
        std::fill(ahead_, ahead_ + kStrips, Place{nullptr, nullptr});
        if (piece == nullptr || !is_direct_) return;
        if (start < 0) start = a_.first_seen(piece->first_position) / kKvTile * kKvTile;
        int64_t seen = a_.first_seen(piece->first_position), count = piece->last_position() + 1 - start;
        for (int64_t strip = 0; strip < kStrips && strip * kStrip < count; ++strip)
            if (start + (strip + 1) * kStrip > seen)
                ahead_[strip] = place_of(a_, *piece, start + strip * kStrip, a_.head_dim * 2);
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
        int64_t row_bytes = width_ * 2;
        for (int64_t half = 0; half < 2; ++half) {
            int64_t strip = 2 * pair + half, valid = valid_[strip];
            const char *from = place_[strip].v;
            Place ahead = strip < kStrips ? ahead_[strip] : Place{nullptr, nullptr};
            for (int64_t i = 0; i < kStrip; i += 2) {
                char *at = to + (half * 8 + i / 2) * 64;
                if (ahead.k != nullptr)
                    for (int64_t byte = i * row_bytes; byte < (i + 2) * row_bytes; byte += 64) {
                        _mm_prefetch(ahead.k + byte, _MM_HINT_T0);
                        _mm_prefetch(ahead.v + byte, _MM_HINT_T0);
                    }
                __mmask16 upper = i < valid ? 0xFFFF : 0, lower = i + 1 < valid ? 0xFFFF : 0;
                for (int64_t step = 0; step < width_ / 32; ++step) {
                    const char *row = from + i * row_bytes + step * 64;
                    __m512i a = _mm512_maskz_loadu_epi32(upper, row), b = _mm512_maskz_loadu_epi32(lower, row + row_bytes);
                    _mm512_store_si512(at + step * 2048, _mm512_unpacklo_epi16(a, b));
                    _mm512_store_si512(at + step * 2048 + 1024, _mm512_unpackhi_epi16(a, b));
                }
            }
        }
    }

    // scores[row][position] = q k for 16 rows and up to four strips at a time.
    void score(const Job &job, float *scores) {
        int64_t strip = 2 * job.begin, last = 2 * job.end;
        const char *keys = packed_k_ + (job.start - start_) * width_ * 2;
        for (; strip + 4 <= last; strip += 4) score_strips<4>(job.row, strip, keys, scores);
        if (strip < last) score_strips<2>(job.row, strip, keys, scores);
    }

    template <int kCount>
    void score_strips(int64_t row, int64_t strip, const char *keys, float *scores) {
        const bf16 *q = query_ + row * width_;
        int64_t stride = width_ * 2, strip_bytes = kStrip * width_ * 2;
        const char *k = keys + strip * strip_bytes;
        float *to = scores + strip * kStrip;
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
    void score_turned(const Job &job, float *scores) {
        int64_t stride = columns_ * 4;
        for (int64_t strip = 2 * job.begin; strip < 2 * job.end; ++strip) {
            _tile_zero(5);
            for (int64_t step = 0; step < width_ / 32; ++step) {
                _tile_loadd(6, place_[strip].k + step * 64, width_ * 2);
                _tile_loadd(7, query_pairs_ + step * 16 * columns_, stride);
                _tile_dpbf16ps(5, 6, 7);
            }
            _tile_stored(5, turned_ + strip * kStrip * columns_, stride);
        }
        for (int64_t strip = 2 * job.begin; strip < 2 * job.end; ++strip) {
            const char *from = reinterpret_cast<const char *>(turned_ + strip * kStrip * columns_);
            for (int64_t row = 0; row < columns_; row += 4) {
                __m512i rows[4];
                transpose(from + row * 4, columns_ * 4, rows);
                for (int i = 0; i < 4; ++i)
                    _mm512_store_si512(scores + (row + i) * kKvTile + strip * kStrip, rows[i]);
            }
        }
    }

    void add_values(const Job &job, const bf16 *weights) {
        int64_t dim = 0;
        for (; dim + 64 <= width_; dim += 64) add_dims<4>(job, weights, dim);
        if (dim < width_) add_dims<2>(job, weights, dim);
    }

    template <int kCount>
    void add_dims(const Job &job, const bf16 *weights, int64_t dim) {
        float *sum = sums_.values + job.row * width_ + dim;
        const char *values = packed_v_ + (job.start - start_) * width_ * 2 + dim * 64;
        int64_t stride = width_ * 4;
        _tile_loadd(0, sum, stride);
        _tile_loadd(1, sum + 16, stride);
        if (kCount > 2) {
            _tile_loadd(2, sum + 32, stride);
            _tile_loadd(3, sum + 48, stride);
        }
        for (int64_t pair = job.begin; pair < job.end; ++pair) {
            const char *v = values + pair * kPair * width_ * 2;
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
        bf16 *out = reinterpret_cast<bf16 *>(a_.out) +
                    (piece_.first_token * a_.num_heads + piece_.head * group_) * a_.head_dim;
        int64_t row = 0;
        for (int64_t token = 0; token < piece_.tokens; ++token, out += a_.num_heads * a_.head_dim)
            for (int64_t head = 0; head < group_; ++head, ++row) finish_row(row, out + head * a_.head_dim);
    }

    void finish_row(int64_t row, bf16 *out) {
        const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        __m512 factor = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(_mm512_load_ps(sums_.totals + row * 16)));
        for (int64_t dim = 0; dim < a_.head_dim; dim += 32) {
            const float *sum = sums_.values + row * width_ + dim;
            __m512 even = _mm512_load_ps(sum), odd = _mm512_load_ps(sum + 16);
            __m512 parts[2] = {_mm512_permutex2var_ps(even, low, odd), _mm512_permutex2var_ps(even, high, odd)};
            for (int i = 0; i < 2; ++i) {
                int count = static_cast<int>(std::min<int64_t>(a_.head_dim - dim - 16 * i, 16));
                // + 0: a zero's sign may depend on which masked tiles were visited.
                Vec result{_mm512_fmadd_ps(parts[i], factor, _mm512_setzero_ps())};
                if (count > 0) store(out + dim + 16 * i, result, count);
            }
        }
    }

    struct RowTile {
        int64_t low, high, head;  // positions of the first and the last row, head in the group of the first
    };

    const Attention &a_;
    const int64_t width_;  // head_dim in whole steps of 32
    const int64_t group_;
    bool is_direct_;  // K and V can be read where they lie
    Piece piece_;
    int64_t rows_, columns_, start_, shaped_ = -1;
    bool is_narrow_;  // one tile of rows
    Place place_[kSpan / kStrip], ahead_[kStrips];
    int64_t valid_[kSpan / kStrip];  // positions of a strip inside the context
    Sums sums_;
    Weigher weigher_;
    float *scores_[kBatch], *turned_;
    bf16 *weights_[kBatch];
    bf16 *query_, *copied_k_, *copied_v_;
    uint32_t *query_pairs_;
    RowTile *row_tiles_;
    char *packed_k_, *packed_v_;
};

inline void attend(const Attention &a, const Pieces &pieces, Worker &worker) {
    PieceOnTiles tiles(a, worker);
    int64_t index = worker.take();
    while (index < pieces.size()) {
        int64_t following = -1;
        Piece ahead;
        auto next = [&]() -> const Piece * {
            following = worker.take();
            if (following >= pieces.size()) return nullptr;
            ahead = pieces[following];
            return &ahead;
        };
        tiles.run(pieces[index], next);
        index = following;
    }
}

}  // namespace attention_tiles
}  // namespace tandem

#endif
