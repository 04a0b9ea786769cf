// out = x @ weight.T + bias, with the weight packed in panels of 32 outputs.
//
// Each output is one chain over the inner dimension, in its order, whatever the number of rows and threads: a panel is
// computed by one thread, rows never meet, and the chain is never split.
//
//   bfloat16: [panels][in / 32][2][16 pairs][16 outputs][2]    a step of 32 inputs is two tiles of 1 KiB
//   others:   [panels][in][32 outputs]
//
// Inputs and outputs are padded with zero weights to whole steps and panels. In a gated linear a panel is 16 gates and
// the 16 ups that belong to them, and yields 16 outputs: gate / (1 + exp(-gate)) * up.
//
// pointers: x, weight, bias (of whole panels, or null), out
// sizes: rows, in, outs, x_stride, out_stride, dtype, prefetch, row_block, is_gated
#pragma once

#include <algorithm>

#include "op.h"
#include "simd.h"

namespace tandem {

constexpr int64_t kPanel = 32;    // outputs
constexpr int64_t kStep = 32;     // inputs, bfloat16
constexpr int64_t kStepBytes = kPanel * kStep * 2;

struct Linear {
    const void *x, *weight, *bias;
    void *out;
    int64_t rows, in, outs, x_stride, out_stride, dtype;
    int64_t prefetch;   // bytes ahead of the weight in use; with many rows a whole panel ahead, unless it is 0
    int64_t row_block;  // rows that pass through all panels of a piece before the next rows do
    bool is_gated;

    explicit Linear(const Op &op)
        : x(op.pointers[0]), weight(op.pointers[1]), bias(op.pointers[2]), out(op.pointers[3]), rows(op.sizes[0]),
          in(op.sizes[1]), outs(op.sizes[2]), x_stride(op.sizes[3]), out_stride(op.sizes[4]), dtype(op.sizes[5]),
          prefetch(op.sizes[6]), row_block(op.sizes[7]), is_gated(op.sizes[8] != 0) {}

    int64_t panel_outs() const { return is_gated ? kPanel / 2 : kPanel; }
    int64_t steps() const { return (in + kStep - 1) / kStep; }
    // Panels whose outputs, of two bytes each, fill a line of the cache: threads that write to one line wait for each other.
    int64_t panels_per_line() const { return kPanel / panel_outs(); }
    int64_t panels() const { return (outs + panel_outs() - 1) / panel_outs(); }
};

constexpr int kVecs = kPanel / kLanes;

template <class T>
inline Vec silu(Vec x) {
    return x / (splat(1.0f) + exp(zero() - x));
}
#if defined(__AVX512F__)
// For a result of 8 bits: an exponential of degree 4 (relative error 4e-5) and a reciprocal of 28 bits. NaN stays NaN.
template <>
inline Vec silu<bf16>(Vec x) {
    Vec t = zero() - min(max(x, splat(-88.0f)), splat(88.0f));
    Vec n = round_to_int(t * splat(1.44269504088896341f));
    Vec r = fma(n, splat(-0.69314718056f), t);
    Vec p = fma(splat(1.0f / 24), r, splat(1.0f / 6));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
    Vec whole = splat(1.0f) + scale(p, n);
    Vec inverse = {_mm512_rcp14_ps(whole.v)};
    inverse = inverse * fma(zero() - whole, inverse, splat(2.0f));
    return x * inverse;
}
#endif

// Sums of one row and panel become outputs. `sums` is overwritten.
template <class T>
void finish_row(const Linear &l, int64_t row, int64_t panel, Vec *sums) {
    if (l.bias != nullptr) {
        const T *bias = static_cast<const T *>(l.bias) + panel * kPanel;
        for (int i = 0; i < kVecs; ++i) sums[i] = sums[i] + load(bias + i * kLanes);
    }
    if (l.is_gated)
        for (int i = 0; i < kVecs / 2; ++i)
            sums[i] = silu<T>(rounded_to<T>(sums[i])) * rounded_to<T>(sums[kVecs / 2 + i]);
    int64_t first = panel * l.panel_outs(), count = std::min(l.outs - first, l.panel_outs());
    T *out = static_cast<T *>(l.out) + row * l.out_stride + first;
    for (int64_t i = 0; i * kLanes < count; ++i)
        store(out + i * kLanes, sums[i], static_cast<int>(std::min<int64_t>(count - i * kLanes, kLanes)));
}

}  // namespace tandem
