// Paged attention in bfloat16 on matrix tiles (AMX), for prompts. See attention.cpp for the method.
#pragma once

#if defined(__AMX_BF16__)

#include "attention_narrow.h"
#include "attention_registers.h"
#include "attention_weights.h"

namespace tandem {
namespace attention_tiles {

constexpr int64_t kSpanTiles = 8;     // KV tiles that are packed together, for all rows of a piece
constexpr int64_t kFetchedTiles = 2;  // so many of the next ones are fetched meanwhile
constexpr int64_t kSpan = kSpanTiles * kKvTile;

// One thread's state of one piece.
class WidePieces {
  public:
    WidePieces(const Attention &a, Carver &carver)
        : a_(a), width_((a.head_dim + 31) & ~int64_t{31}), group_(a.group()), weigher_(a, sums_) {
        is_direct_ = a.block_size % kStrip == 0 && width_ == a.head_dim;
        carve(carver, (a.query_block * group_ + kRows - 1) & ~(kRows - 1));
    }

    // `next`: the piece after this one, or null.
    void run(const Piece &piece, const Piece *next) {
        piece_ = piece;
        rows_ = piece.tokens * group_;
        use_shapes();
        load_query();
        int64_t tile = a_.first_seen(piece.first_position) / kKvTile, end = piece.last_position() / kKvTile + 1;
        for (int64_t count; tile < end; tile += count) {
            count = std::min(end - tile, kSpanTiles);
            start_ = tile * kKvTile;
            if (tile + count < end)
                prefetch_from(&piece_, start_ + count * kKvTile);
            else
                prefetch_from(next, -1);
            visit_span(count);
        }
        finish();
    }

  private:
    void carve(Carver &carver, int64_t rows) {
        query_ = carver.take<bf16>(rows * width_);
        row_tiles_ = carver.take<RowTile>(rows / kRows);
        for (int slot : {0, 1}) {
            scores_[slot] = carver.take<float>(kRows * kKvTile);
            weights_[slot] = carver.take<bf16>(kRows * kKvTile);
        }
        packed_k_ = carver.take<char>(kSpan * width_ * 2);
        packed_v_ = carver.take<char>(kSpan * width_ * 2);
        copied_k_ = carver.take<bf16>(kSpan * width_);
        copied_v_ = carver.take<bf16>(kSpan * width_);
        sums_.carve(carver, rows, width_);
    }

    // Tiles 0 to 3: scores or sums; 4: rows of Q or P; 6 and 7: K or V.
    static void use_shapes() {
        TileShapes shapes;
        for (int tile : {0, 1, 2, 3, 4, 6, 7}) shapes.set(tile, 16, 64);
        shapes.use();
    }

    void load_query() {
        int64_t padded = (rows_ + kRows - 1) & ~(kRows - 1), row_bytes = a_.head_dim * 2;
        const char *from = a_.query + (piece_.first_token * a_.num_heads + piece_.head * group_) * row_bytes;
        if (width_ != a_.head_dim || padded != rows_) memset(query_, 0, padded * width_ * 2);
        bf16 *to = query_;
        for (int64_t token = 0; token < piece_.tokens; ++token, from += a_.num_heads * row_bytes)
            for (int64_t head = 0; head < group_; ++head, to += width_) memcpy(to, from + head * row_bytes, row_bytes);
        int64_t low = piece_.first_position, head = 0;
        for (int64_t row = 0; row < rows_; row += kRows) {
            int64_t last_head = head + std::min(rows_ - row, kRows) - 1, high = low + last_head / group_;
            row_tiles_[row / kRows] = {low, high, head};
            low = high + (last_head + 1) / group_ - last_head / group_;
            head = (last_head + 1) % group_;
        }
        weigher_.clear(padded);
    }

    // All rows against `count` KV tiles from start_ on.
    void visit_span(int64_t count) {
        int64_t first = std::max(a_.first_seen(piece_.first_position) - start_, int64_t{0}) / kPair;
        int64_t last = std::min(piece_.last_position() - start_, count * kKvTile - 1) / kPair + 1;
        find_strips(2 * first, 2 * last);
        for (int64_t pair = first; pair < last; ++pair) {
            for (int64_t strip : {2 * pair, 2 * pair + 1}) {
                pack_keys(place_[strip].k, width_, packed_k_ + strip * kStrip * width_ * 2);
                char *values = packed_v_ + pair * kPair * width_ * 2 + strip % 2 * 512;
                Place ahead = ahead_[strip];
                pack_values(place_[strip].v, width_, valid_[strip], values, [&](int64_t i, int64_t step) {
                    if (ahead.k == nullptr) return;
                    for (int64_t byte : {(i * width_ + step * 32) * 2, ((i + 1) * width_ + step * 32) * 2}) {
                        _mm_prefetch(ahead.k + byte, _MM_HINT_T1);
                        _mm_prefetch(ahead.v + byte, _MM_HINT_T1);
                    }
                });
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
            weigher_.weigh(jobs[i], scores_[i & 1], weights_[i & 1]);
        }
        add_values(jobs[num_jobs - 1], (num_jobs - 1) & 1);
    }

    // Where the tile's strips of 16 positions lie, in the cache or in a copy with whole strips and steps.
    void find_strips(int64_t first, int64_t last) {
        for (int64_t strip = first; strip < last; ++strip) {
            int64_t position = start_ + strip * kStrip;
            valid_[strip] = std::min(std::max(piece_.context - position, int64_t{0}), kStrip);
            if (is_direct_)
                place_[strip] = place_of(a_, piece_, std::min(position, (piece_.context - 1) & -kStrip), width_ * 2);
            else
                place_[strip] = copy_strip(a_, piece_, position, width_, copied_k_ + strip * kStrip * width_,
                                           copied_v_ + strip * kStrip * width_);
        }
    }

    // What to fetch while this tile is computed: the KV tile at `start`, or the first one that the piece sees.
    void prefetch_from(const Piece *piece, int64_t start) {
        std::fill(ahead_, ahead_ + kSpan / kStrip, Place{nullptr, nullptr});
        if (piece == nullptr || !is_direct_) return;
        if (start < 0) start = a_.first_seen(piece->first_position) / kKvTile * kKvTile;
        int64_t seen = a_.first_seen(piece->first_position), count = piece->last_position() + 1 - start;
        for (int64_t strip = 0; strip < kFetchedTiles * kStrips && strip * kStrip < count; ++strip)
            if (start + (strip + 1) * kStrip > seen)
                ahead_[strip] = place_of(a_, *piece, start + strip * kStrip, a_.head_dim * 2);
    }

    // scores[row][position] = q k for 16 rows, two or four strips at a time.
    void score(const Job &job, int slot) {
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

    // sums += P V, 32 or 64 dims at a time.
    void add_values(const Job &job, int slot) {
        const bf16 *p = weights_[slot];
        const char *v = packed_v_ + (job.start - start_) * width_ * 2;
        float *sum = sums_.values + job.row * width_;
        int64_t dim = 0;
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
            for (int64_t head = 0; head < group_; ++head, ++row)
                sums_.write(row, a_.head_dim, out + head * a_.head_dim);
    }

    struct RowTile {
        int64_t low, high, head;  // positions of the first and the last row, head in the group of the first
    };

    const Attention &a_;
    const int64_t width_;  // head_dim in whole steps of 32
    const int64_t group_;
    bool is_direct_;  // K and V can be read where they lie
    Piece piece_;
    int64_t rows_, start_;
    Place place_[kSpan / kStrip], ahead_[kSpan / kStrip];
    int64_t valid_[kSpan / kStrip];  // positions of a strip inside the context
    Sums sums_;
    Weigher weigher_;
    float *scores_[2];
    bf16 *weights_[2];
    bf16 *query_, *copied_k_, *copied_v_;
    RowTile *row_tiles_;
    char *packed_k_, *packed_v_;
};

inline void attend(const Attention &a, const Pieces &pieces, Worker &worker) {
    Carver measure(nullptr);
    WidePieces(a, measure), NarrowPieces(a, measure);
    Carver carver(worker.scratch(measure.bytes()));
    WidePieces wide(a, carver);
    NarrowPieces narrow(a, carver);
    for (int64_t index = worker.take(), following; index < pieces.size(); index = following) {
        following = worker.take();
        Piece piece = pieces[index];
        if (piece.tokens * a.group() <= kRows) {
            narrow.add(piece);
            continue;
        }
        narrow.finish();
        Piece ahead;
        bool has_next = following < pieces.size();
        if (has_next) ahead = pieces[following];
        wide.run(piece, has_next ? &ahead : nullptr);
    }
    narrow.finish();
}

}  // namespace attention_tiles
}  // namespace tandem

#endif
