// The vector forms of the linear, and the choice among all forms. See linear.h for what is computed.
#include "linear.h"

#include <type_traits>

#include "linear_tiles.h"

namespace tandem {
namespace {

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
    for (int row = 0; row < kRows; ++row)
        for (int i = 0; i < kVecs; ++i) sums[row][i] = zero();
    for (int64_t step = 0, steps = l.steps(); step < steps; ++step) {
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
    if constexpr (std::is_same<T, bf16>::value) {
        auto weight = static_cast<const uint32_t *>(l.weight) + panel * l.steps() * (kStepBytes / 4);
        multiply_pairs<kRows>(l, x, weight, sums);
    } else {
        multiply_singles<T, kRows>(l, x, static_cast<const T *>(l.weight) + panel * l.in * kPanel, sums);
    }
    for (int i = 0; i < kRows; ++i) finish_row<T>(l, row + i, panel, sums[i]);
}

template <class T>
void linear_vectors(const Linear &l, Worker &worker) {
    constexpr int kRows = kLanes == 16 ? 8 : 2;
    for (Worker::Range piece; (piece = worker.take_share(l.panels(), l.panels_per_line())).first < l.panels();) {
        for (int64_t panel = piece.first; panel < piece.last; ++panel) {
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
            return LinearOnTiles(l, worker).run(worker);
#else
            return linear_vectors<bf16>(l, worker);
#endif
    }
}

}  // namespace tandem
