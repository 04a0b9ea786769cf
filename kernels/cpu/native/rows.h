// What ops that work row by row share: the type of the elements, and a thread's share of the rows.
#pragma once

#include "op.h"
#include "simd.h"

namespace tandem {

// Calls `body` with a value of the storage type.
template <class Body>
void with_type(int64_t dtype, Body body) {
    if (dtype == kFloat32) return body(float{});
    if (dtype == kBFloat16) return body(bf16{});
    body(fp16{});
}

// The rows of this thread: an equal share, so that no shared counter is touched for so little work.
template <class Body>
void for_own_rows(int64_t rows, const Worker &worker, Body body) {
    int64_t first = rows * worker.index / worker.count, last = rows * (worker.index + 1) / worker.count;
    for (int64_t row = first; row < last; ++row) body(row);
}

}  // namespace tandem
