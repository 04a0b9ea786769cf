// What all native ops share: the record that Python fills in, and how one op is run by several threads.
#pragma once

#include <atomic>
#include <cstdint>

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
    int64_t take(int64_t pieces = 1) { return count == 1 ? alone_(pieces) : next_->fetch_add(pieces); }

    // At least `bytes` of memory, 64-byte aligned, contents undefined; valid until this thread's next call.
    void *scratch(int64_t bytes);

    const int index;
    const int count;

  private:
    int64_t alone_(int64_t pieces) {
        int64_t piece = position_;
        position_ += pieces;
        return piece;
    }
    friend class Step;
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
