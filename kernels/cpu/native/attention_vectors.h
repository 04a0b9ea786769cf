// Paged attention on vectors of float32: any storage dtype, any instruction set. See attention.cpp for the method.
#pragma once

#include "attention.h"
#include "simd.h"

namespace tandem {
namespace attention_vectors {

constexpr int64_t kRows = 4;                   // query rows that are computed together
constexpr int64_t kVecs = kKvTile / kLanes;    // vectors of one row of scores

// One thread's state of one piece.
template <class T>
class PieceOnVectors {
  public:
    PieceOnVectors(const Attention &a, Worker &worker)
        : a_(a), dim_(a.head_dim), width_((dim_ + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes)), group_(a.group()) {
        int64_t rows = (a.query_block * group_ + kRows - 1) / kRows * kRows;
        Carver measure(nullptr);
        carve(measure, rows);
        Carver carver(worker.scratch(measure.bytes()));
        carve(carver, rows);
    }

    void run(const Piece &piece) {
        piece_ = piece;
        rows_ = piece.tokens * group_;
        load_query();
        int64_t last = piece.last_position() / kKvTile;
        for (int64_t tile = a_.first_seen(piece.first_position) / kKvTile; tile <= last; ++tile) {
            start_ = tile * kKvTile;
            load_tile();
            for (int64_t row = 0; row < rows_; row += kRows) {
                int64_t low = position_of(row), high = position_of(std::min(row + kRows, rows_) - 1);
                if (high < start_ || a_.first_seen(low) >= start_ + kKvTile) continue;
                score(row);
                for (int64_t i = 0; i < kRows; ++i) weigh(row + i, scores_ + i * kKvTile);
                add_values(row);
            }
        }
        finish();
    }

  private:
    void carve(Carver &carver, int64_t rows) {
        query_ = carver.take<float>(rows * dim_);
        keys_ = carver.take<float>(dim_ * kKvTile);
        values_ = carver.take<float>(kKvTile * width_);
        scores_ = carver.take<float>(kRows * kKvTile);
        sums_ = carver.take<float>(rows * width_);
        totals_ = carver.take<float>(rows);
        maxima_ = carver.take<float>(rows);
        one_row_ = carver.take<float>(width_);
    }

    // Rows behind the last are copies of its token's position, with zeros for a query.
    int64_t position_of(int64_t row) const { return piece_.first_position + std::min(row, rows_ - 1) / group_; }

    // One row of storage as float32; zeros behind head_dim.
    void widen(const T *from, float *to) const {
        for (int64_t dim = 0; dim < width_; dim += kLanes) {
            int64_t count = std::min<int64_t>(dim_ - dim, kLanes);
            store(to + dim, count > 0 ? load(from + dim, static_cast<int>(count)) : zero());
        }
    }

    void load_query() {
        int64_t padded = (rows_ + kRows - 1) / kRows * kRows;
        std::fill(query_ + rows_ * dim_, query_ + padded * dim_, 0.0f);
        for (int64_t row = 0; row < rows_; ++row) {
            int64_t head = (piece_.first_token + row / group_) * a_.num_heads + piece_.head * group_ + row % group_;
            widen(reinterpret_cast<const T *>(a_.query) + head * dim_, one_row_);
            for (int64_t dim = 0; dim < dim_; ++dim) query_[row * dim_ + dim] = one_row_[dim] * a_.scale;
        }
        std::fill(sums_, sums_ + padded * width_, 0.0f);
        std::fill(totals_, totals_ + padded, 0.0f);
        std::fill(maxima_, maxima_ + padded, kNoMaximum);
    }

    // K as [dims][positions] and V as [positions][dims]; zeros behind the context, where memory may hold NaN.
    void load_tile() {
        int64_t count = std::min(piece_.context - start_, kKvTile);
        for (int64_t i = 0; i < count; ++i) {
            Place place = place_of(a_, piece_, start_ + i, dim_ * static_cast<int64_t>(sizeof(T)));
            widen(reinterpret_cast<const T *>(place.k), one_row_);
            for (int64_t dim = 0; dim < dim_; ++dim) keys_[dim * kKvTile + i] = one_row_[dim];
            widen(reinterpret_cast<const T *>(place.v), values_ + i * width_);
        }
        if (count == kKvTile) return;
        for (int64_t dim = 0; dim < dim_; ++dim)
            std::fill(keys_ + dim * kKvTile + count, keys_ + (dim + 1) * kKvTile, 0.0f);
        std::fill(values_ + count * width_, values_ + kKvTile * width_, 0.0f);
    }

    void score(int64_t row) {
        const float *q = query_ + row * dim_;
        for (int64_t vec = 0; vec < kVecs; vec += 2) {
            Vec sums[kRows][2];
            for (auto &pair : sums) pair[0] = pair[1] = zero();
            for (int64_t dim = 0; dim < dim_; ++dim) {
                const float *k = keys_ + dim * kKvTile + vec * kLanes;
                Vec low = load(k), high = load(k + kLanes);
                for (int64_t i = 0; i < kRows; ++i) {
                    Vec value = splat(q[i * dim_ + dim]);
                    sums[i][0] = fma(value, low, sums[i][0]);
                    sums[i][1] = fma(value, high, sums[i][1]);
                }
            }
            for (int64_t i = 0; i < kRows; ++i) {
                store(scores_ + i * kKvTile + vec * kLanes, sums[i][0]);
                store(scores_ + i * kKvTile + (vec + 1) * kLanes, sums[i][1]);
            }
        }
    }

    // softcap * tanh(x / softcap), from 1 - 2 / (e^2x + 1).
    Vec cap(Vec x) const {
        Vec power = exp(x * splat(2 / a_.softcap));
        return splat(a_.softcap) * (splat(1.0f) - splat(2.0f) / (power + splat(1.0f)));
    }

    // Scores of one row become weights; its maximum, total and sums follow. A row that sees nothing keeps its bits:
    // the maximum stays, its decay is exactly 1, and the weights are 0.
    void weigh(int64_t row, float *scores) {
        int64_t position = position_of(row);
        auto from = static_cast<int>(std::min(std::max(a_.first_seen(position) - start_, int64_t{0}), kKvTile));
        auto to = static_cast<int>(std::min(std::max(position + 1 - start_, int64_t{0}), kKvTile));
        auto seen = [&](int vec, Vec x, float otherwise) {
            int base = vec * kLanes;
            auto clamp = [](int n) { return std::min(std::max(n, 0), kLanes); };
            Vec others = splat(otherwise);
            return select_first(clamp(from - base), others, select_first(clamp(to - base), x, others));
        };
        Vec largest = splat(kNoMaximum);
        for (int vec = 0; vec < kVecs; ++vec) {
            Vec x = load(scores + vec * kLanes);
            if (a_.softcap != 0) x = cap(x);
            x = seen(vec, x, kNoMaximum);
            store(scores + vec * kLanes, x);
            largest = max(largest, x);
        }
        float maximum = std::max(maxima_[row], lane_max(largest));
        Vec total = zero();
        for (int vec = 0; vec < kVecs; ++vec) {
            Vec p = seen(vec, exp(load(scores + vec * kLanes) - splat(maximum)), 0.0f);
            store(scores + vec * kLanes, p);
            total = total + p;
        }
        float decays[kLanes];
        store(decays, exp(splat(maxima_[row] - maximum)));
        totals_[row] = totals_[row] * decays[0] + lane_sum(total);
        maxima_[row] = maximum;
        if (decays[0] == 1.0f) return;
        for (int64_t dim = 0; dim < width_; dim += kLanes)
            store(sums_ + row * width_ + dim, load(sums_ + row * width_ + dim) * splat(decays[0]));
    }

    void add_values(int64_t row) {
        for (int64_t dim = 0; dim < width_; dim += 2 * kLanes) {
            Vec sums[kRows][2];
            for (int64_t i = 0; i < kRows; ++i)
                for (int64_t j = 0; j < 2; ++j) sums[i][j] = load(sums_ + (row + i) * width_ + dim + j * kLanes);
            for (int64_t position = 0; position < kKvTile; ++position) {
                const float *v = values_ + position * width_ + dim;
                Vec low = load(v), high = load(v + kLanes);
                for (int64_t i = 0; i < kRows; ++i) {
                    Vec p = splat(scores_[i * kKvTile + position]);
                    sums[i][0] = fma(p, low, sums[i][0]);
                    sums[i][1] = fma(p, high, sums[i][1]);
                }
            }
            for (int64_t i = 0; i < kRows; ++i)
                for (int64_t j = 0; j < 2; ++j) store(sums_ + (row + i) * width_ + dim + j * kLanes, sums[i][j]);
        }
    }

    void finish() {
        for (int64_t row = 0; row < rows_; ++row) {
            int64_t head = (piece_.first_token + row / group_) * a_.num_heads + piece_.head * group_ + row % group_;
            T *out = reinterpret_cast<T *>(a_.out) + head * dim_;
            Vec total = splat(totals_[row]);
            for (int64_t dim = 0; dim < dim_; dim += kLanes) {
                // + 0: a zero's sign may depend on which masked tiles were visited.
                Vec result = load(sums_ + row * width_ + dim) / total + zero();
                store(out + dim, result, static_cast<int>(std::min<int64_t>(dim_ - dim, kLanes)));
            }
        }
    }

    const Attention &a_;
    const int64_t dim_, width_;  // width_: dim_ in whole pairs of vectors
    const int64_t group_;
    Piece piece_;
    int64_t rows_, start_;
    float *query_, *keys_, *values_, *scores_, *sums_, *totals_, *maxima_, *one_row_;
};

template <class T>
void attend(const Attention &a, const Pieces &pieces, Worker &worker) {
    PieceOnVectors<T> vectors(a, worker);
    for (int64_t index; (index = worker.take()) < pieces.size();) vectors.run(pieces[index]);
}

}  // namespace attention_vectors
}  // namespace tandem
