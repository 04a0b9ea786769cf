// Paged attention in bfloat16 on matrix tiles (AMX). See attention.cpp for the method.
#pragma once

#if defined(__AMX_BF16__)

#include "attention_registers.h"
#include "attention_weights.h"

namespace tandem {
namespace attention_tiles {

constexpr int64_t kSpanTiles = 8;    // KV tiles that are packed together, for all rows of a piece
constexpr int64_t kNarrowTiles = 2;  // the same for pieces with one tile of rows
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
            count = std::min(end - tile, is_narrow_ ? kNarrowTiles : kSpanTiles);
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
        for (int slot : {0, 1}) {
            scores_[slot] = carver.take<float>(kRows * kKvTile);
            turned_[slot] = carver.take<float>(kRows * kKvTile);
            weights_[slot] = carver.take<bf16>(kRows * kKvTile);
        }
        packed_k_ = carver.take<char>(kSpan * width_ * 2);
        packed_v_ = carver.take<char>(kSpan * width_ * 2);
        copied_k_ = carver.take<bf16>(kSpan * width_);
        copied_v_ = carver.take<bf16>(kSpan * width_);
        sums_.values = carver.take<float>(rows * width_);
        sums_.totals = carver.take<float>(rows * 16);
        sums_.maxima = carver.take<float>(rows);
        sums_.limits = carver.take<float>(rows);
        sums_.offsets = carver.take<float>(rows);
        sums_.width = width_;
    }

    // Tiles 0 to 3: scores or sums of 16 rows; 4: rows of Q or P; 6 and 7: K or V. Narrow pieces: 0 and 1 sums, 2 and 3
    // turned scores, 4 P, 6 K or V, 7 Q in pairs.
    void use_shapes() {
        int64_t rows = std::min(rows_, kRows);
        columns_ = (rows + 3) & ~int64_t{3};
        if (shaped_ == rows_ || (shaped_ > kRows && rows_ > kRows)) return;
        shaped_ = rows_;
        TileShapes shapes;
        for (int tile : {0, 1, 4}) shapes.set(tile, static_cast<int>(rows), 64);
        shapes.set(6, 16, 64);
        int bytes = is_narrow_ ? static_cast<int>(columns_ * 4) : 64;
        for (int tile : {2, 3, 7}) shapes.set(tile, 16, bytes);
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
        for (int64_t row = 0; row < padded; ++row) weigher_.set_maximum(row, kNoMaximum);
    }

    // All rows against `count` KV tiles from start_ on.
    void visit_span(int64_t count) {
        int64_t first = std::max(a_.first_seen(piece_.first_position) - start_, int64_t{0}) / kPair;
        int64_t last = std::min(piece_.last_position() - start_, count * kKvTile - 1) / kPair + 1;
        find_strips(2 * first, 2 * last);
        for (int64_t pair = first; pair < last; ++pair) {
            for (int64_t strip : {2 * pair, 2 * pair + 1}) {
                if (!is_narrow_) pack_keys(place_[strip].k, width_, packed_k_ + strip * kStrip * width_ * 2);
                char *values = packed_v_ + pair * kPair * width_ * 2 + strip % 2 * 512;
                pack_values(place_[strip].v, width_, valid_[strip], ahead_[strip], values);
            }
        }
        for (int64_t row = 0; row < rows_; row += kRows) visit_row_tile(row, count);
    }

    // 16 rows against `count` KV tiles from start_ on.
    //
    // Vectors and matrix units load what the other has stored, which takes a while to get to the cache, and vectors run
    // at half their speed while products are under way. So products come in one go: the scores of the next KV tile,
    // then the weighted values of the previous one.
    void visit_row_tile(int64_t row, int64_t count) {
        Job jobs[kSpanTiles];
        int num_jobs = 0;
        auto [low, high, head] = row_tiles_[row / kRows];
        for (int64_t start = start_; start < start_ + count * kKvTile; start += kKvTile) {
            if (high < start || a_.first_seen(low) >= start + kKvTile) continue;
            int64_t begin = std::max(a_.first_seen(low) - start, int64_t{0}) / kPair;
            int64_t end = std::min(high - start, kKvTile - 1) / kPair + 1;
            bool is_masked = start + kPair * end - 1 > low || a_.first_seen(high) > start + kPair * begin;
            jobs[num_jobs++] = {row, std::min(rows_ - row, kRows), begin, end, start, low, head, is_masked};
        }
        if (num_jobs == 0) return;
        score(jobs[0], 0);
        for (int i = 0; i < num_jobs; ++i) {
            if (i + 1 < num_jobs) score(jobs[i + 1], (i + 1) & 1);
            if (i > 0) add_values(jobs[i - 1], (i - 1) & 1);
            weigh(jobs[i], i & 1);
        }
        add_values(jobs[num_jobs - 1], (num_jobs - 1) & 1);
    }

    void weigh(const Job &job, int slot) {
        if (is_narrow_) turn(job, slot);
        weigher_.weigh(job, scores_[slot], weights_[slot]);
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
        std::fill(ahead_, ahead_ + kSpan / kStrip, Place{nullptr, nullptr});
        if (piece == nullptr || !is_direct_) return;
        if (start < 0) start = a_.first_seen(piece->first_position) / kKvTile * kKvTile;
        int64_t seen = a_.first_seen(piece->first_position), count = piece->last_position() + 1 - start;
        for (int64_t strip = 0; strip < kNarrowTiles * kStrips && strip * kStrip < count; ++strip)
            if (start + (strip + 1) * kStrip > seen)
                ahead_[strip] = place_of(a_, *piece, start + strip * kStrip, a_.head_dim * 2);
    }

    // scores[row][position] = q k for 16 rows, two or four strips at a time.
    void score(const Job &job, int slot) {
        if (is_narrow_) return score_turned(job, slot);
        int64_t pair = job.begin;
        for (; pair + 2 <= job.end; pair += 2) score_strips<4>(job, 2 * pair, scores_[slot]);
        if (pair < job.end) score_strips<2>(job, 2 * pair, scores_[slot]);
    }

    template <int kCount>
    void score_strips(const Job &job, int64_t strip, float *scores) {
        const bf16 *q = query_ + job.row * width_;
        int64_t strip_bytes = kStrip * width_ * 2;
        const char *k = packed_k_ + ((job.start - start_) / kStrip + strip) * strip_bytes;
        clear<0>();
        clear<1>();
        if (kCount > 2) {
            clear<2>();
            clear<3>();
        }
        for (int64_t step = 0; step < width_ / 32; ++step, k += 1024) {
            load_tile<4>(q + step * 32, width_ * 2);
            load_tile<6>(k, 64);
            multiply_add<0, 4, 6>();
            load_tile<7>(k + strip_bytes, 64);
            multiply_add<1, 4, 7>();
            if (kCount > 2) {
                load_tile<6>(k + 2 * strip_bytes, 64);
                multiply_add<2, 4, 6>();
                load_tile<7>(k + 3 * strip_bytes, 64);
                multiply_add<3, 4, 7>();
            }
        }
        store_tiles<kCount>(scores + strip * kStrip, kKvTile * 4);
    }

    template <int kCount>
    static void store_tiles(float *to, int64_t row_bytes) {
        store_tile<0>(to, row_bytes);
        store_tile<1>(to + 16, row_bytes);
        if (kCount == 2) return;
        store_tile<2>(to + 32, row_bytes);
        store_tile<3>(to + 48, row_bytes);
    }

    // The same scores, with K as it lies in the cache times Q in pairs: cheaper for one tile of rows, and the same
    // bits, because each is the same chain of products.
    void score_turned(const Job &job, int slot) {
        int64_t strip = 2 * job.begin, last = 2 * job.end, stride = columns_ * 4;
        const Place *places = place_ + (job.start - start_) / kStrip;
        auto to = [&](int64_t strip) { return turned_[slot] + strip * kStrip * columns_; };
        for (; strip < last; strip += 2) {
            clear<2>();
            clear<3>();
            for (int64_t step = 0; step < width_ / 32; ++step) {
                load_tile<7>(query_pairs_ + step * 16 * columns_, stride);
                load_tile<6>(places[strip].k + step * 64, width_ * 2);
                multiply_add<2, 6, 7>();
                load_tile<6>(places[strip + 1].k + step * 64, width_ * 2);
                multiply_add<3, 6, 7>();
            }
            store_tile<2>(to(strip), stride);
            store_tile<3>(to(strip + 1), stride);
        }
    }

    void turn(const Job &job, int slot) {
        for (int64_t strip = 2 * job.begin; strip < 2 * job.end; ++strip) {
            const char *from = reinterpret_cast<const char *>(turned_[slot] + strip * kStrip * columns_);
            for (int64_t row = 0; row < columns_; row += 4) {
                __m512i rows[4];
                transpose(from + row * 4, columns_ * 4, rows);
                for (int i = 0; i < 4; ++i)
                    _mm512_store_si512(scores_[slot] + (row + i) * kKvTile + strip * kStrip, rows[i]);
            }
        }
    }

    // sums += P V, 32 or 64 dims at a time.
    void add_values(const Job &job, int slot) {
        const bf16 *p = weights_[slot];
        const char *v = packed_v_ + (job.start - start_) * width_ * 2;
        float *sum = sums_.values + job.row * width_;
        int64_t dim = 0;
        if (!is_narrow_)
            for (; dim + 64 <= width_; dim += 64) add_dims<4, 7>(job, p, v + dim * 64, sum + dim);
        for (; dim < width_; dim += 32) add_dims<2, 6>(job, p, v + dim * 64, sum + dim);
    }

    // kOther: a second register for V, if there is one.
    template <int kCount, int kOther>
    void add_dims(const Job &job, const bf16 *p, const char *v, float *sum) {
        load_tile<0>(sum, width_ * 4);
        load_tile<1>(sum + 16, width_ * 4);
        if (kCount > 2) {
            load_tile<2>(sum + 32, width_ * 4);
            load_tile<3>(sum + 48, width_ * 4);
        }
        for (int64_t pair = job.begin; pair < job.end; ++pair) {
            const char *from = v + pair * kPair * width_ * 2;
            load_tile<4>(p + pair * kPair, kKvTile * 2);
            load_tile<6>(from, 64);
            multiply_add<0, 4, 6>();
            load_tile<kOther>(from + 1024, 64);
            multiply_add<1, 4, kOther>();
            if (kCount > 2) {
                load_tile<6>(from + 2048, 64);
                multiply_add<2, 4, 6>();
                load_tile<kOther>(from + 3072, 64);
                multiply_add<3, 4, kOther>();
            }
        }
        store_tiles<kCount>(sum, width_ * 4);
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
            // + 0: a zero's sign may depend on which masked tiles were visited.
            auto result = [&](__m512i order) {
                return _mm512_fmadd_ps(_mm512_permutex2var_ps(even, order, odd), factor, _mm512_setzero_ps());
            };
            auto rounded = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(result(high), result(low)));
            auto kept = static_cast<__mmask16>((1ull << std::min<int64_t>((a_.head_dim - dim) / 2, 16)) - 1);
            _mm512_mask_storeu_epi32(out + dim, kept, rounded);
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
    Place place_[kSpan / kStrip], ahead_[kSpan / kStrip];
    int64_t valid_[kSpan / kStrip];  // positions of a strip inside the context
    Sums sums_;
    Weigher weigher_;
    float *scores_[2], *turned_[2];
    bf16 *weights_[2];
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
