// What all native ops share: the record that Python fills in, and how one op is run by several threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

namespace tandem {

// One op with its addresses and shapes. Python (records.py) writes the same fields; a captured step is an array of them.
struct Op {
    int64_t code;
    void *pointers[24];
    int64_t sizes[16];
    double numbers[4];
};

enum DType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// One thread's part in an op. `scratch` is the thread's own memory, kept between ops and steps.
class Worker {
  public:
    Worker(int index, int count, std::atomic<int64_t> *next) : index(index), count(count), next_(next) {}

    // The next piece of shared work, from 0; pieces go to whoever is free, so results may not depend on who computes.
    int64_t take() { return count == 1 ? position_++ : next_->fetch_add(1); }

    struct Range {
        int64_t first, last;
    };

    // The next pieces of `total`, in whole `units`: many at first and fewer towards the end, so that a thread has
    // neighbours to itself and all are done together. Empty, at `total`, when all are taken.
    Range take_share(int64_t total, int64_t unit) {
        if (count == 1) return {std::exchange(position_, total), total};
        int64_t first = next_->load(std::memory_order_relaxed), last;
        do {
            int64_t share = std::max<int64_t>(1, (total - first) / (kShares * count * unit));
            last = std::min(first + share * unit, total);
        } while (first < total && !next_->compare_exchange_weak(first, last));
        return {first, last};
    }

    // At least `bytes` of memory, 64-byte aligned, contents undefined; valid until this thread's next call.
    void *scratch(int64_t bytes);

    const int index;
    const int count;

  private:
    static constexpr int64_t kShares = 3;  // of what is left, per thread

    std::atomic<int64_t> *next_;
    int64_t position_ = 0;
};

using Kernel = void (*)(const Op &, Worker &);

// One per op code; see run.cpp for the table.
void embedding(const Op &, Worker &);
void rms_norm(const Op &, Worker &);
void rope_and_write_kv(const Op &, Worker &);
void linear(const Op &, Worker &);
void paged_attention(const Op &, Worker &);
void sample(const Op &, Worker &);

}  // namespace tandem
