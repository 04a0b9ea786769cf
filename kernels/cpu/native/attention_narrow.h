// Paged attention on matrix tiles, for pieces with one tile of rows: decode steps, most of all.
//
// With three rows of queries, say, a KV tile is little work behind much latency: of memory, of the cache between matrix
// and vector units. So the KV tiles of all pieces are one stream, and while one is weighed, others are on their way:
//
//     step i:  V of tile i - 2 packed  |  scores of tile i  |  values of tile i - 2 added  |  weights of tile i - 1
//
// Packed V is one buffer, used at once: with two, and K and V streaming past, each was in the second cache when it was
// written again. Meanwhile the lines of tile i + kAhead are fetched, a few at a time: a core has 16 requests under way,
// and what comes behind a burst of them waits.
#pragma once

#if defined(__AMX_BF16__)

#include "attention_registers.h"
#include "attention_weights.h"

namespace tandem {
namespace attention_tiles {

class NarrowPieces {
  public:
    NarrowPieces(const Attention &a, Carver &carver)
        : a_(a), width_((a.head_dim + 31) & ~int64_t{31}), group_(a.group()) {
        is_direct_ = a.block_size % kStrip == 0 && width_ == a.head_dim;
        for (auto &state : states_) state.carve(carver, width_);
        packed_ = carver.take<char>(kKvTile * width_ * 2);
        for (auto &slot : slots_) {
            slot.turned = carver.take<float>(kRows * kKvTile);
            slot.weights = carver.take<bf16>(kRows * kKvTile);
            slot.copied_k = carver.take<bf16>(is_direct_ ? 0 : kKvTile * width_);
            slot.copied_v = carver.take<bf16>(is_direct_ ? 0 : kKvTile * width_);
        }
    }

    // At most kRows rows. Its results are there after `finish`, at the latest.
    void add(const Piece &piece) {
        int64_t rows = piece.tokens * group_;
        if (rows != rows_) {
            finish();
            use_shapes(rows);
        }
        int64_t first = a_.first_seen(piece.first_position) / kKvTile, last = piece.last_position() / kKvTile;
        for (int64_t tile = first; tile <= last; ++tile) {
            open(visits_[opened_ % kRing], piece, tile * kKvTile, tile == first, tile == last);
            ++opened_;
            step(opened_ - 1);
        }
    }

    // Everything that was added. Afterwards tile registers may have other shapes.
    void finish() {
        for (int64_t i = 0; opened_ > 0 && i < kAhead + 2; ++i) step(opened_ + i);
        opened_ = num_pieces_ = 0;
        rows_ = -1;
    }

  private:
    static constexpr int kAhead = 1, kRing = kAhead + 3;

    // What a piece carries from tile to tile.
    struct State {
        uint32_t *query;  // [pairs of dims][columns]
        Sums sums;

        void carve(Carver &carver, int64_t width) {
            query = carver.take<uint32_t>(kRows * width / 2);
            sums.carve(carver, kRows, width);
        }
    };

    // One KV tile of one piece.
    struct Visit {
        Piece piece;
        bool is_first, is_last;
        Job job;
        Place places[kStrips];  // of its strips, in the cache
        State *state;
    };

    struct Slot {
        float *turned;  // scores, [positions][columns]
        bf16 *weights;  // [rows][positions]
        bf16 *copied_k, *copied_v;
    };

    // The lines of a visit, in order, some at a time.
    class Lines {
      public:
        void start(const Visit &visit, int64_t strip_bytes) {
            num_parts_ = part_ = 0;
            bytes_ = strip_bytes;
            for (int64_t strip = 2 * visit.job.begin; strip < 2 * visit.job.end; strip += 2) {
                parts_[num_parts_++] = visit.places[strip].k;
                parts_[num_parts_++] = visit.places[strip + 1].k;
                parts_[num_parts_++] = visit.places[strip].v;
                parts_[num_parts_++] = visit.places[strip + 1].v;
            }
            left_ = num_parts_ > 0 ? bytes_ : 0;
        }
        void clear() { left_ = 0; }

        // kCount divides the lines of a strip: head_dim / 2, a multiple of 16.
        template <int kCount>
        __attribute__((always_inline)) void fetch() {
            if (left_ == 0) return;
            const char *at = parts_[part_] + bytes_ - left_;
            for (int line = 0; line < kCount; ++line) _mm_prefetch(at + line * 64, _MM_HINT_T1);
            left_ -= kCount * 64;
            if (left_ == 0 && ++part_ < num_parts_) left_ = bytes_;
        }

      private:
        const char *parts_[4 * kKvTile / kPair];
        int num_parts_ = 0, part_ = 0;
        int64_t bytes_ = 0, left_ = 0;
    };

    // Tiles 0 to 3: sums; 4: P; 5: Q; 2 and 3: turned scores; 6 and 7: K or V.
    void use_shapes(int64_t rows) {
        rows_ = rows;
        columns_ = (rows + 3) & ~int64_t{3};
        TileShapes shapes;
        for (int tile : {0, 1, 4}) shapes.set(tile, static_cast<int>(rows), 64);
        for (int tile : {6, 7}) shapes.set(tile, 16, 64);
        for (int tile : {2, 3, 5}) shapes.set(tile, 16, static_cast<int>(columns_ * 4));
        shapes.use();
    }

    void open(Visit &visit, const Piece &piece, int64_t start, bool is_first, bool is_last) {
        int64_t low = piece.first_position, high = piece.last_position();
        int64_t begin = std::max(a_.first_seen(low) - start, int64_t{0}) / kPair;
        int64_t end = std::min(high - start, kKvTile - 1) / kPair + 1;
        bool is_masked = start + kPair * end - 1 > low || a_.first_seen(high) > start + kPair * begin;
        if (is_first) ++num_pieces_;
        visit.piece = piece;
        visit.is_first = is_first;
        visit.is_last = is_last;
        visit.job = {0, rows_, begin, end, start, low, 0, is_masked};
        visit.state = &states_[num_pieces_ % kStates];
        lines_.clear();
        if (!is_direct_) return;
        for (int64_t strip = 2 * begin; strip < 2 * end; ++strip) {
            int64_t position = std::min(start + strip * kStrip, (piece.context - 1) & -kStrip);
            visit.places[strip] = place_of(a_, piece, position, width_ * 2);
        }
        lines_.start(visit, kStrip * width_ * 2);
    }

    // `newest` is the visit that has just been opened, or one that will never be.
    void step(int64_t newest) {
        int64_t i = newest - kAhead;
        auto is_there = [&](int64_t index) { return index >= 0 && index < opened_; };
        if (is_there(i - 2)) pack(visits_[(i - 2) % kRing]);
        if (is_there(i)) score(visits_[i % kRing], slots_[i % 2]);
        if (is_there(i - 2)) add_values(visits_[(i - 2) % kRing], slots_[i % 2]);
        if (is_there(i - 1)) weigh(visits_[(i - 1) % kRing], slots_[(i - 1) % 2]);
    }

    // K as it lies in the cache times Q in pairs: scores turned by 90 degrees, with the bits of those that
    // attention_tiles.h computes, because each is the same chain of products.
    void score(Visit &visit, const Slot &slot) {
        if (visit.is_first) load_query(visit);
        if (!is_direct_) copy(visit, slot);
        const uint32_t *query = visit.state->query;
        int64_t stride = columns_ * 4;
        for (int64_t strip = 2 * visit.job.begin; strip < 2 * visit.job.end; strip += 2) {
            const char *low = visit.places[strip].k, *high = visit.places[strip + 1].k;
            clear<2>();
            clear<3>();
            for (int64_t step = 0; step < width_ / 32; ++step) {
                load_tile<5>(query + step * 16 * columns_, stride);
                load_tile<6>(low + step * 64, width_ * 2);
                multiply_add<2, 6, 5>();
                lines_.fetch<8>();
                load_tile<7>(high + step * 64, width_ * 2);
                multiply_add<3, 7, 5>();
                lines_.fetch<8>();
            }
            store_tile<2>(slot.turned + strip * kStrip * columns_, stride);
            store_tile<3>(slot.turned + (strip + 1) * kStrip * columns_, stride);
        }
    }

    void load_query(const Visit &visit) {
        const Piece &piece = visit.piece;
        State &state = *visit.state;
        int64_t dwords = a_.head_dim / 2, row = 0;
        if (width_ != a_.head_dim || columns_ != rows_) memset(state.query, 0, width_ / 2 * columns_ * 4);
        auto from = reinterpret_cast<const uint32_t *>(a_.query) +
                    (piece.first_token * a_.num_heads + piece.head * group_) * dwords;
        for (int64_t token = 0; token < piece.tokens; ++token, from += a_.num_heads * dwords)
            for (int64_t head = 0; head < group_; ++head, ++row)
                for (int64_t pair = 0; pair < dwords; ++pair)
                    state.query[pair * columns_ + row] = from[head * dwords + pair];
        Weigher(a_, state.sums).clear(rows_);
    }

    void copy(Visit &visit, const Slot &slot) {
        for (int64_t strip = 2 * visit.job.begin; strip < 2 * visit.job.end; ++strip)
            visit.places[strip] = copy_strip(a_, visit.piece, visit.job.start + strip * kStrip, width_,
                                             slot.copied_k + strip * kStrip * width_,
                                             slot.copied_v + strip * kStrip * width_);
    }

    // Weights of the visit's rows, four at a time.
    void weigh(const Visit &visit, const Slot &slot) {
        const Job &job = visit.job;
        Weigher weigher(a_, visit.state->sums);
        for (int64_t row = 0; row < rows_; row += 4) {
            __m512 scores[4][kStrips];
            for (int64_t strip = 0; strip < kStrips; ++strip) {
                turn(slot.turned + strip * kStrip * columns_ + row, columns_ * 4, strip, scores);
                lines_.fetch<8>();
            }
            for (int64_t i = 0; i < std::min<int64_t>(rows_ - row, 4); ++i) {
                weigher.weigh_row(job, row + i, scores[i], slot.weights + (row + i) * kKvTile);
                lines_.fetch<8>();
            }
        }
    }

    // Scores of 16 positions from [positions][columns], `stride` bytes apart, for four rows.
    static void turn(const float *from, int64_t stride, int64_t strip, __m512 scores[4][kStrips]) {
        if (stride > 16) {
            __m512i rows[4];
            transpose(reinterpret_cast<const char *>(from), stride, rows);
            for (int i = 0; i < 4; ++i) scores[i][strip] = _mm512_castsi512_ps(rows[i]);
            return;
        }
        const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(2));
        __m512 a = _mm512_load_ps(from), b = _mm512_load_ps(from + 16), c = _mm512_load_ps(from + 32),
               d = _mm512_load_ps(from + 48);
        __m512 low = _mm512_permutex2var_ps(a, first, b), high = _mm512_permutex2var_ps(c, first, d);
        scores[0][strip] = _mm512_shuffle_f32x4(low, high, 0x44);
        scores[1][strip] = _mm512_shuffle_f32x4(low, high, 0xEE);
        low = _mm512_permutex2var_ps(a, second, b), high = _mm512_permutex2var_ps(c, second, d);
        scores[2][strip] = _mm512_shuffle_f32x4(low, high, 0x44);
        scores[3][strip] = _mm512_shuffle_f32x4(low, high, 0xEE);
    }

    void pack(const Visit &visit) {
        const Job &job = visit.job;
        for (int64_t strip = 2 * job.begin; strip < 2 * job.end; ++strip) {
            int64_t valid = std::min(visit.piece.context - (job.start + strip * kStrip), kStrip);
            char *to = packed_ + strip / 2 * kPair * width_ * 2 + strip % 2 * 512;
            pack_values(visit.places[strip].v, width_, valid, to, [&](int64_t, int64_t) { lines_.fetch<2>(); });
        }
    }

    void add_values(const Visit &visit, const Slot &slot) {
        const Sums &sums = visit.state->sums;
        for (int64_t dim = 0; dim < width_; dim += 32) {
            float *sum = sums.values + dim;
            load_tile<0>(sum, width_ * 4);
            load_tile<1>(sum + 16, width_ * 4);
            for (int64_t pair = visit.job.begin; pair < visit.job.end; ++pair) {
                const char *from = packed_ + pair * kPair * width_ * 2 + dim * 64;
                load_tile<4>(slot.weights + pair * kPair, kKvTile * 2);
                load_tile<6>(from, 64);
                multiply_add<0, 4, 6>();
                lines_.fetch<8>();
                load_tile<7>(from + 1024, 64);
                multiply_add<1, 4, 7>();
                lines_.fetch<8>();
            }
            store_tile<0>(sum, width_ * 4);
            store_tile<1>(sum + 16, width_ * 4);
        }
        if (!visit.is_last) return;
        const Piece &piece = visit.piece;
        bf16 *out = reinterpret_cast<bf16 *>(a_.out) +
                    (piece.first_token * a_.num_heads + piece.head * group_) * a_.head_dim;
        for (int64_t row = 0; row < rows_; ++row)
            sums.write(row, a_.head_dim, out + (row / group_ * a_.num_heads + row % group_) * a_.head_dim);
    }

    static constexpr int kStates = 4;  // pieces between scores and values: three

    const Attention &a_;
    const int64_t width_;  // head_dim in whole steps of 32
    const int64_t group_;
    bool is_direct_;  // K and V can be read where they lie
    int64_t rows_ = -1, columns_ = 0;
    int64_t opened_ = 0, num_pieces_ = 0;  // visits and pieces since the last `finish`
    State states_[kStates];
    Slot slots_[2];
    char *packed_;  // V of one tile
    Visit visits_[kRing];
    Lines lines_;
};

}  // namespace attention_tiles
}  // namespace tandem

#endif
