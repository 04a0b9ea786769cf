// Ops that touch each element once: embedding, (add +) RMSNorm.
#include <algorithm>
#include <cmath>

#include "rows.h"

namespace tandem {

// pointers: ids (int64), table, out; sizes: rows, row_bytes, table_rows
void embedding(const Op &op, Worker &worker) {
    auto ids = static_cast<const int64_t *>(op.pointers[0]);
    auto table = static_cast<const char *>(op.pointers[1]);
    auto out = static_cast<char *>(op.pointers[2]);
    int64_t row_bytes = op.sizes[1], table_rows = op.sizes[2];
    for_own_rows(op.sizes[0], worker, [&](int64_t row) {
        int64_t id = std::clamp<int64_t>(ids[row], 0, table_rows - 1);
        memcpy(out + row * row_bytes, table + id * row_bytes, row_bytes);
    });
}

// pointers: x, residual (or null), weight, out; sizes: rows, width, dtype, x_stride, out_stride; numbers: eps
void rms_norm(const Op &op, Worker &worker) {
    int64_t width = op.sizes[1], x_stride = op.sizes[3], out_stride = op.sizes[4];
    float eps = static_cast<float>(op.numbers[0]);
    with_type(op.sizes[2], [&](auto type) {
        using T = decltype(type);
        auto weight = static_cast<const T *>(op.pointers[2]);
        for_own_rows(op.sizes[0], worker, [&](int64_t row) {
            auto x = static_cast<const T *>(op.pointers[0]) + row * x_stride;
            auto out = static_cast<T *>(op.pointers[3]) + row * out_stride;
            const T *source = x;
            Vec squares = zero();
            auto residual = static_cast<T *>(op.pointers[1]);
            if (residual != nullptr) {
                residual += row * width;
                source = residual;
            }
            for (int64_t i = 0; i < width; i += kLanes) {
                int n = static_cast<int>(std::min<int64_t>(width - i, kLanes));
                Vec value = load(x + i, n);
                if (residual != nullptr) {
                    value = rounded_to<T>(value + load(residual + i, n));
                    store(residual + i, value, n);
                }
                squares = fma(value, value, squares);
            }
            float mean = lane_sum(squares) / static_cast<float>(width);
            Vec factor = splat(1.0f / std::sqrt(mean + eps));
            for (int64_t i = 0; i < width; i += kLanes) {
                int n = static_cast<int>(std::min<int64_t>(width - i, kLanes));
                Vec value = rounded_to<T>(load(source + i, n) * factor);
                store(out + i, value * load(weight + i, n), n);
            }
        });
    });
}

}  // namespace tandem
