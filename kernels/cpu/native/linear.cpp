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
// sizes: rows, in, outs, x_stride, out_stride, dtype, prefetch, grain, row_block, is_gated
#include <algorithm>

#include "amx.h"
#include "op.h"
#include "simd.h"

namespace tandem {
namespace {

constexpr int64_t kPanel = 32;    // outputs
constexpr int64_t kStep = 32;     // inputs, bfloat16
constexpr int64_t kStepBytes = kPanel * kStep * 2;

struct Linear {
    const void *x, *weight, *bias;
    void *out;
    int64_t rows, in, outs, x_stride, out_stride, dtype;
    int64_t prefetch;  // bytes ahead of the weight in use
    int64_t grain;     // panels that a thread takes at a time
    int64_t row_block; // rows that pass through all panels of a piece before the next rows do
    bool is_gated;

    explicit Linear(const Op &op)
        : x(op.pointers[0]), weight(op.pointers[1]), bias(op.pointers[2]), out(op.pointers[3]), rows(op.sizes[0]),
          in(op.sizes[1]), outs(op.sizes[2]), x_stride(op.sizes[3]), out_stride(op.sizes[4]), dtype(op.sizes[5]),
          prefetch(op.sizes[6]), grain(op.sizes[7]), row_block(op.sizes[8]), is_gated(op.sizes[9] != 0) {}

    int64_t panel_outs() const { return is_gated ? kPanel / 2 : kPanel; }
    int64_t panels() const { return (outs + panel_outs() - 1) / panel_outs(); }
};

constexpr int kVecs = kPanel / kLanes;

inline Vec silu(Vec x) { return x / (splat(1.0f) + exp(zero() - x)); }

// Sums of one row and panel become outputs. `sums` is overwritten.
template <class T>
void finish_row(const Linear &l, int64_t row, int64_t panel, Vec *sums) {
    if (l.bias != nullptr) {
        const T *bias = static_cast<const T *>(l.bias) + panel * kPanel;
        for (int i = 0; i < kVecs; ++i) sums[i] = sums[i] + load(bias + i * kLanes);
    }
    if (l.is_gated)
        for (int i = 0; i < kVecs / 2; ++i)
            sums[i] = silu(rounded_to<T>(sums[i])) * rounded_to<T>(sums[kVecs / 2 + i]);
    int64_t first = panel * l.panel_outs(), count = std::min(l.outs - first, l.panel_outs());
    T *out = static_cast<T *>(l.out) + row * l.out_stride + first;
    for (int64_t i = 0; i * kLanes < count; ++i)
        store(out + i * kLanes, sums[i], static_cast<int>(std::min<int64_t>(count - i * kLanes, kLanes)));
}

#if defined(__AMX_BF16__)

// Up to 32 rows against one panel: tiles 0 to 3 accumulate, 4 and 5 hold rows of x, 6 and 7 weights.
template <bool kTwo>
void multiply_tiles(const char *x, int64_t x_bytes, const char *weight, int64_t steps, int64_t prefetch, float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    if (kTwo) {
        _tile_zero(2);
        _tile_zero(3);
    }
    const char *below = x + 16 * x_bytes;
    for (int64_t step = 0; step < steps; ++step) {
        const char *w = weight + step * kStepBytes;
        if (prefetch)
            for (int64_t line = 0; line < kStepBytes; line += 64) _mm_prefetch(w + prefetch + line, _MM_HINT_T0);
        _tile_loadd(4, x + step * 64, x_bytes);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 1024, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (kTwo) {
            _tile_loadd(5, below + step * 64, x_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    if (kTwo) {
        _tile_stored(2, sums + 16 * 32, 128);
        _tile_stored(3, sums + 16 * 32 + 16, 128);
    }
}

// Sums of up to 32 rows, one below the other, become outputs.
void finish_tiles(const Linear &l, int64_t first_row, int64_t rows, int64_t panel, const float *sums) {
    if (l.bias != nullptr || l.is_gated || (panel + 1) * kPanel > l.outs) {
        for (int64_t i = 0; i < rows; ++i) {
            Vec pair[2] = {load(sums + i * kPanel), load(sums + i * kPanel + 16)};
            finish_row<bf16>(l, first_row + i, panel, pair);
        }
        return;
    }
    bf16 *out = static_cast<bf16 *>(l.out) + first_row * l.out_stride + panel * kPanel;
    for (int64_t i = 0; i < rows; ++i) store_pair(out + i * l.out_stride, load(sums + i * kPanel), load(sums + i * kPanel + 16));
}

void use_shapes(int64_t rows) {
    TileShapes shapes;
    int upper = static_cast<int>(std::min<int64_t>(rows, 16)), lower = static_cast<int>(std::max<int64_t>(rows - 16, 1));
    for (int tile : {0, 1, 4}) shapes.set(tile, upper, 64);
    for (int tile : {2, 3, 5}) shapes.set(tile, lower, 64);
    for (int tile : {6, 7}) shapes.set(tile, 16, 64);
    shapes.use();
}

// x with rows of whole steps: itself, or a zero-padded copy in `memory`.
const char *whole_steps(const Linear &l, int64_t steps, char *memory, int64_t *row_bytes) {
    if (l.in % kStep == 0) {
        *row_bytes = l.x_stride * 2;
        return static_cast<const char *>(l.x);
    }
    *row_bytes = steps * kStep * 2;
    memset(memory, 0, l.rows * *row_bytes);
    for (int64_t row = 0; row < l.rows; ++row)
        memcpy(memory + row * *row_bytes, static_cast<const char *>(l.x) + row * l.x_stride * 2, l.in * 2);
    return memory;
}

void linear_tiles(const Linear &l, Worker &worker) {
    int64_t steps = (l.in + kStep - 1) / kStep, panels = l.panels();
    char *memory = static_cast<char *>(worker.scratch(l.rows * steps * kStep * 2));
    int64_t row_bytes;
    const char *x = whole_steps(l, steps, memory, &row_bytes);
    alignas(64) float sums[32 * 32];
    int64_t shaped = 0;
    for (int64_t first; (first = worker.take(l.grain)) < panels;) {
        int64_t last = std::min(first + l.grain, panels);
        for (int64_t block = 0; block < l.rows; block += l.row_block) {
            int64_t block_end = std::min(block + l.row_block, l.rows);
            for (int64_t panel = first; panel < last; ++panel) {
                const char *weight = static_cast<const char *>(l.weight) + panel * steps * kStepBytes;
                for (int64_t row = block; row < block_end; row += 32) {
                    int64_t rows = std::min<int64_t>(block_end - row, 32);
                    if (rows != shaped) use_shapes(shaped = rows);
                    int64_t prefetch = row == block ? l.prefetch : 0;
                    if (rows > 16)
                        multiply_tiles<true>(x + row * row_bytes, row_bytes, weight, steps, prefetch, sums);
                    else
                        multiply_tiles<false>(x + row * row_bytes, row_bytes, weight, steps, prefetch, sums);
                    finish_tiles(l, row, rows, panel, sums);
                }
            }
        }
    }
}

#endif

// A pair of bfloat16 inputs, splatted, times the pairs of kLanes outputs.
struct Pair {
    Vec low, high;
};
inline Pair load_pairs(const uint32_t *p) {
#if defined(__AVX512F__)
    __m512i bits = _mm512_loadu_si512(p);
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))},
            {_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0xFFFF0000)))}};
#elif defined(__AVX2__)
    __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xFFFF0000))))}};
#else
    Pair pair;
    for (int i = 0; i < kLanes; ++i) {
        uint32_t low = p[i] << 16, high = p[i] & 0xFFFF0000u;
        memcpy(&pair.low.v[i], &low, 4);
        memcpy(&pair.high.v[i], &high, 4);
    }
    return pair;
#endif
}

// kRows rows against one panel of bfloat16 pairs.
template <int kRows>
void multiply_pairs(const Linear &l, const bf16 *x, const uint32_t *weight, Vec (*sums)[kVecs]) {
    int64_t steps = (l.in + kStep - 1) / kStep;
    for (int row = 0; row < kRows; ++row)
        for (int i = 0; i < kVecs; ++i) sums[row][i] = zero();
    for (int64_t step = 0; step < steps; ++step) {
        const uint32_t *w = weight + step * (kStepBytes / 4);
        for (int64_t k = 0; k < std::min<int64_t>(16, (l.in - step * kStep + 1) / 2); ++k) {
            int64_t input = step * kStep + 2 * k;
            bool has_second = input + 1 < l.in;
            for (int i = 0; i < kVecs; ++i) {
                const uint32_t *pairs = w + (i * kLanes / 16) * 256 + k * 16 + (i * kLanes) % 16;
#if defined(__AVX512BF16__)
                __m512bh wide = reinterpret_cast<__m512bh>(_mm512_loadu_si512(pairs));
                for (int row = 0; row < kRows; ++row) {
                    const bf16 *at = x + row * l.x_stride + input;
                    uint32_t both = at[0].bits | (has_second ? uint32_t{at[1].bits} << 16 : 0);
                    __m512bh splatted = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(both)));
                    sums[row][i].v = _mm512_dpbf16_ps(sums[row][i].v, splatted, wide);
                }
#else
                Pair pair = load_pairs(pairs);
                for (int row = 0; row < kRows; ++row) {
                    const bf16 *at = x + row * l.x_stride + input;
                    sums[row][i] = fma(splat(to_float(at[0])), pair.low, sums[row][i]);
                    if (has_second) sums[row][i] = fma(splat(to_float(at[1])), pair.high, sums[row][i]);
                }
#endif
            }
        }
    }
}

// kRows rows against one panel of single elements.
template <class T, int kRows>
void multiply_singles(const Linear &l, const T *x, const T *weight, Vec (*sums)[kVecs]) {
    for (int row = 0; row < kRows; ++row)
        for (int i = 0; i < kVecs; ++i) sums[row][i] = zero();
    for (int64_t k = 0; k < l.in; ++k) {
        Vec w[kVecs];
        for (int i = 0; i < kVecs; ++i) w[i] = load(weight + k * kPanel + i * kLanes);
        for (int row = 0; row < kRows; ++row) {
            Vec value = splat(to_float(x[row * l.x_stride + k]));
            for (int i = 0; i < kVecs; ++i) sums[row][i] = fma(value, w[i], sums[row][i]);
        }
    }
}

template <class T, int kRows>
void rows_against_panel(const Linear &l, int64_t row, int64_t panel) {
    Vec sums[kRows][kVecs];
    const T *x = static_cast<const T *>(l.x) + row * l.x_stride;
    if constexpr (sizeof(T) == 2 && !std::is_same<T, fp16>::value) {
        int64_t steps = (l.in + kStep - 1) / kStep;
        multiply_pairs<kRows>(l, x, static_cast<const uint32_t *>(l.weight) + panel * steps * (kStepBytes / 4), sums);
    } else {
        multiply_singles<T, kRows>(l, x, static_cast<const T *>(l.weight) + panel * l.in * kPanel, sums);
    }
    for (int i = 0; i < kRows; ++i) finish_row<T>(l, row + i, panel, sums[i]);
}

template <class T>
void linear_vectors(const Linear &l, Worker &worker) {
    constexpr int kRows = kLanes == 16 ? 8 : 2;
    for (int64_t first; (first = worker.take(l.grain)) < l.panels();) {
        for (int64_t panel = first; panel < std::min(first + l.grain, l.panels()); ++panel) {
            int64_t row = 0;
            for (; row + kRows <= l.rows; row += kRows) rows_against_panel<T, kRows>(l, row, panel);
            for (; row < l.rows; ++row) rows_against_panel<T, 1>(l, row, panel);
        }
    }
}

}  // namespace

void linear(const Op &op, Worker &worker) {
    Linear l(op);
    switch (l.dtype) {
        case kFloat32: return linear_vectors<float>(l, worker);
        case kFloat16: return linear_vectors<fp16>(l, worker);
        default:
#if defined(__AMX_BF16__)
            return linear_tiles(l, worker);
#else
            return linear_vectors<bf16>(l, worker);
#endif
    }
}

}  // namespace tandem
