// QK-norm, rotation and the write of K and V into their blocks, in one pass over the step's tokens.
#include <algorithm>
#include <cmath>

#include "rows.h"

namespace tandem {
namespace {

struct Rope {
    const void *qkv;
    const float *cos, *sin;
    const void *q_weight, *k_weight;  // null: no QK-norm
    char *kv_cache;
    const int64_t *slots, *query_starts;
    void *query;
    int64_t rows, num_seqs, num_heads, num_kv_heads, head_dim, block_size, block_bytes, kv_head_bytes, k_offset,
        v_offset;
    float eps;

    explicit Rope(const Op &op)
        : qkv(op.pointers[0]), cos(static_cast<const float *>(op.pointers[1])),
          sin(static_cast<const float *>(op.pointers[2])), q_weight(op.pointers[3]), k_weight(op.pointers[4]),
          kv_cache(static_cast<char *>(op.pointers[5])), slots(static_cast<const int64_t *>(op.pointers[6])),
          query_starts(static_cast<const int64_t *>(op.pointers[7])), query(op.pointers[8]), rows(op.sizes[0]),
          num_seqs(op.sizes[1]), num_heads(op.sizes[2]), num_kv_heads(op.sizes[3]), head_dim(op.sizes[4]),
          block_size(op.sizes[5]), block_bytes(op.sizes[6]), kv_head_bytes(op.sizes[7]), k_offset(op.sizes[8]),
          v_offset(op.sizes[9]), eps(static_cast<float>(op.numbers[0])) {}
};

// out = rotate(norm(x)) for one head.
template <class T>
void rotate_head(const Rope &r, const T *x, const void *norm, const float *cos, const float *sin, T *out) {
    int64_t half = r.head_dim / 2;
    Vec factor = zero();
    auto weight = static_cast<const T *>(norm);
    if (norm != nullptr) {
        Vec squares = zero();
        for (int64_t i = 0; i < r.head_dim; i += kLanes) {
            Vec value = load(x + i, static_cast<int>(std::min<int64_t>(r.head_dim - i, kLanes)));
            squares = fma(value, value, squares);
        }
        factor = splat(1.0f / std::sqrt(lane_sum(squares) / static_cast<float>(r.head_dim) + r.eps));
    }
    for (int64_t i = 0; i < half; i += kLanes) {
        int n = static_cast<int>(std::min<int64_t>(half - i, kLanes));
        Vec first = load(x + i, n), second = load(x + half + i, n);
        if (norm != nullptr) {
            first = rounded_to<T>(rounded_to<T>(first * factor) * load(weight + i, n));
            second = rounded_to<T>(rounded_to<T>(second * factor) * load(weight + half + i, n));
        }
        Vec c = load(cos + i, n), s = load(sin + i, n);
        store(out + i, first * c - second * s, n);
        store(out + half + i, second * c + first * s, n);
    }
}

template <class T>
void rope_row(const Rope &r, int64_t row) {
    int64_t width = (r.num_heads + 2 * r.num_kv_heads) * r.head_dim;
    auto qkv = static_cast<const T *>(r.qkv) + row * width;
    auto query = static_cast<T *>(r.query) + row * r.num_heads * r.head_dim;
    const float *cos = r.cos + row * (r.head_dim / 2), *sin = r.sin + row * (r.head_dim / 2);
    for (int64_t head = 0; head < r.num_heads; ++head)
        rotate_head(r, qkv + head * r.head_dim, r.q_weight, cos, sin, query + head * r.head_dim);
    char *block = r.kv_cache + r.slots[row] / r.block_size * r.block_bytes;
    int64_t offset = r.slots[row] % r.block_size * r.head_dim;
    const T *key = qkv + r.num_heads * r.head_dim, *value = key + r.num_kv_heads * r.head_dim;
    for (int64_t head = 0; head < r.num_kv_heads; ++head) {
        char *place = block + head * r.kv_head_bytes;
        auto k = reinterpret_cast<T *>(place + r.k_offset) + offset;
        auto v = reinterpret_cast<T *>(place + r.v_offset) + offset;
        rotate_head(r, key + head * r.head_dim, r.k_weight, cos, sin, k);
        memcpy(v, value + head * r.head_dim, r.head_dim * sizeof(T));
    }
}

}  // namespace

void rope_and_write_kv(const Op &op, Worker &worker) {
    Rope r(op);
    // Rows behind the last sequence are padding: their slots may be anybody's.
    int64_t rows = std::min(r.rows, r.query_starts[r.num_seqs]);
    with_type(op.sizes[10], [&](auto type) {
        for_own_rows(rows, worker, [&](int64_t row) { rope_row<decltype(type)>(r, row); });
    });
}

}  // namespace tandem
