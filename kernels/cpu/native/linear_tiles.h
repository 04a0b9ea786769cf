// The bfloat16 linear on matrix tiles.
//
// Up to 32 rows meet a panel at a time. While the tiles multiply one block, the vector units turn the sums of the block
// before into outputs, and the weights of the next panel come in, so many lines with each step.
#pragma once

#if defined(__AMX_BF16__)

#include "amx.h"
#include "linear.h"

namespace tandem {

class LinearOnTiles {
  public:
    LinearOnTiles(const Linear &l, Worker &worker) : l_(l), steps_(l.steps()) {
        if (l.in % kStep == 0) {
            row_bytes_ = l.x_stride * 2;
            x_ = static_cast<const char *>(l.x);
        } else {
            row_bytes_ = steps_ * kStep * 2;
            x_ = padded(static_cast<char *>(worker.scratch(l.rows * row_bytes_)));
        }
    }

    void run(Worker &worker) {
        int64_t panels = l_.panels(), unit = l_.panels_per_line();
        for (Worker::Range piece = worker.take_share(panels, unit), next; piece.first < panels; piece = next) {
            next = worker.take_share(panels, unit);  // now, to know whose weights to fetch
            run_piece(piece.first, piece.last, std::min(next.first, panels - 1));
        }
        finish_rows(kBlock);
    }

  private:
    static constexpr int64_t kBlock = 32;  // rows
    static constexpr int64_t kLines = kStepBytes / 64;

    // A block whose sums are complete, some of whose rows may be outputs already.
    struct Pending {
        int64_t row = 0, end = 0, panel = 0;
        const float *sums = nullptr;
    };

    // Where the next lines of weights to fetch are. Not into the first cache: rows of x fill it.
    class Fetch {
      public:
        Fetch(const char *at, int64_t lines) : at(at), lines(lines) {}

        const char *at;
        int64_t lines;  // with each step

        void step() { some(lines); }
        void quarter() { some(lines / 4); }

      private:
        void some(int64_t count) {
            for (int64_t line = 0; line < count; ++line, at += 64) _mm_prefetch(at, _MM_HINT_T1);
        }
    };

    const char *weight(int64_t panel) const {
        return static_cast<const char *>(l_.weight) + panel * steps_ * kStepBytes;
    }

    // x with rows of whole steps, zeros behind.
    const char *padded(char *memory) const {
        memset(memory, 0, l_.rows * row_bytes_);
        for (int64_t row = 0; row < l_.rows; ++row)
            memcpy(memory + row * row_bytes_, static_cast<const bf16 *>(l_.x) + row * l_.x_stride, l_.in * 2);
        asm volatile("" : : : "memory");  // loads of tiles do not tell the compiler what they read
        return memory;
    }

    void run_piece(int64_t first, int64_t last, int64_t next_piece) {
        for (int64_t row = 0; row < l_.rows; row += l_.row_block) {
            int64_t end = std::min(row + l_.row_block, l_.rows);
            for (int64_t panel = first; panel < last; ++panel) {
                int64_t after = panel + 1 < last ? panel + 1 : end < l_.rows ? first : next_piece;
                run_panel(panel, after, row, end);
            }
        }
    }

    void run_panel(int64_t panel, int64_t after, int64_t first_row, int64_t end) {
        int64_t blocks = (end - first_row + kBlock - 1) / kBlock, bytes = steps_ * kStepBytes;
        Fetch fetch{weight(after), (kLines + blocks - 1) / blocks};
        for (int64_t row = first_row; row < end; row += kBlock) {
            int64_t rows = std::min(end - row, kBlock);
            use_shapes(rows);
            if (l_.prefetch == 0 || fetch.at >= weight(after) + bytes) fetch.lines = 0;
            float *sums = sums_[parity_ ^= 1];
            clear_sums(rows);
            if (blocks == 1)
                only_block(row, rows, panel, after);
            else
                steps<true>(row, rows, weight(panel), 0, steps_, fetch);
            store_sums(rows, sums);
            finish_rows(kBlock);
            pending_ = {row, row + rows, panel, sums};
        }
    }

    // A panel's only block: weights are fetched `prefetch` bytes ahead, first the rest of this panel, then the next.
    void only_block(int64_t row, int64_t rows, int64_t panel, int64_t after) {
        Fetch fetch{weight(panel) + l_.prefetch, l_.prefetch ? kLines : 0};
        int64_t own = std::max<int64_t>(0, steps_ - l_.prefetch / kStepBytes);
        steps<false>(row, rows, weight(panel), 0, own, fetch);
        fetch.at = weight(after);
        steps<false>(row, rows, weight(panel), own, steps_, fetch);
    }

    void clear_sums(int64_t rows) {
        _tile_zero(0);
        _tile_zero(1);
        if (rows > 16) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }

    // Tiles 0 to 3 accumulate, 4 and 5 hold rows of x, 6 and 7 weights. Rows that are streamed pass by the first cache,
    // where the panel should stay. With few rows the lines of weights to fetch are many, and are spread over the step: a
    // burst would hold up the loads behind it.
    template <bool kStreamRows>
    void steps(int64_t row, int64_t rows, const char *weight, int64_t first, int64_t last, Fetch &fetch) {
        const char *x = x_ + row * row_bytes_;
        int64_t finishing = (pending_.end - pending_.row + steps_ - 1) / steps_;
        for (int64_t step = first; step < last; ++step) {
            const char *w = weight + step * kStepBytes;
            if (kStreamRows) {
                fetch.step();
                _tile_stream_loadd(4, x + step * 64, row_bytes_);
            } else {
                _tile_loadd(4, x + step * 64, row_bytes_);
            }
            _tile_loadd(6, w, 64);
            if (!kStreamRows) fetch.quarter();
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w + 1024, 64);
            if (!kStreamRows) fetch.quarter();
            _tile_dpbf16ps(1, 4, 7);
            if (rows > 16) {
                if (kStreamRows) _tile_stream_loadd(5, x + 16 * row_bytes_ + step * 64, row_bytes_);
                else _tile_loadd(5, x + 16 * row_bytes_ + step * 64, row_bytes_);
                if (!kStreamRows) fetch.quarter();
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
                if (!kStreamRows) fetch.quarter();
            } else if (!kStreamRows) {
                fetch.quarter();
                fetch.quarter();
            }
            finish_rows(finishing);
        }
    }

    void store_sums(int64_t rows, float *sums) {
        _tile_stored(0, sums, kPanel * 4);
        _tile_stored(1, sums + 16, kPanel * 4);
        if (rows > 16) {
            _tile_stored(2, sums + 16 * kPanel, kPanel * 4);
            _tile_stored(3, sums + 16 * kPanel + 16, kPanel * 4);
        }
    }

    // Turn the next sums of the pending block into outputs, so many rows at most.
    void finish_rows(int64_t count) {
        for (; count > 0 && pending_.row < pending_.end; --count, ++pending_.row, pending_.sums += kPanel) {
            Vec low = load(pending_.sums), high = load(pending_.sums + 16);
            bool is_whole = l_.bias == nullptr && (pending_.panel + 1) * l_.panel_outs() <= l_.outs;
            bf16 *out = static_cast<bf16 *>(l_.out) + pending_.row * l_.out_stride + pending_.panel * l_.panel_outs();
            if (!is_whole) {
                Vec pair[2] = {low, high};
                finish_row<bf16>(l_, pending_.row, pending_.panel, pair);
            } else if (l_.is_gated) {
                store(out, silu<bf16>(rounded_to<bf16>(low)) * rounded_to<bf16>(high));
            } else {
                store_pair(out, low, high);
            }
        }
    }

    void use_shapes(int64_t rows) {
        if (rows == shaped_) return;
        shaped_ = rows;
        TileShapes shapes;
        int upper = static_cast<int>(std::min<int64_t>(rows, 16));
        int lower = static_cast<int>(std::max<int64_t>(rows - 16, 1));
        for (int tile : {0, 1, 4}) shapes.set(tile, upper, 64);
        for (int tile : {2, 3, 5}) shapes.set(tile, lower, 64);
        for (int tile : {6, 7}) shapes.set(tile, 16, 64);
        shapes.use();
    }

    const Linear &l_;
    const int64_t steps_;
    const char *x_;
    int64_t row_bytes_;
    alignas(64) float sums_[2][kBlock * kPanel];
    int parity_ = 0;
    int64_t shaped_ = 0;
    Pending pending_;
};

}  // namespace tandem

#endif
