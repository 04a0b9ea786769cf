// Paged attention on matrix tiles: K and V from rows in the cache to the order that tiles want.
#pragma once

#if defined(__AMX_BF16__)

#include <immintrin.h>

#include "attention.h"
#include "simd.h"

namespace tandem {
namespace attention_tiles {

constexpr int64_t kStrip = 16;  // positions of one tile of K, and of one vector of scores
constexpr int64_t kPair = 32;   // positions of one tile of V, and of one step of P V
constexpr int64_t kStrips = kKvTile / kStrip;
constexpr int64_t kRows = 16;       // query rows of one tile

// 16 rows of 4 dwords, `stride` bytes apart, to 4 vectors of 16.
inline void transpose(const char *base, int64_t stride, __m512i out[4]) {
    __m512i x[4];
    for (int t = 0; t < 4; ++t) {
        const char *row = base + t * stride;
        auto at = [&](int64_t block) {
            return _mm_loadu_si128(reinterpret_cast<const __m128i *>(row + 4 * block * stride));
        };
        x[t] = _mm512_castsi128_si512(at(0));
        x[t] = _mm512_mask_broadcast_i32x4(x[t], 0x00F0, at(1));
        x[t] = _mm512_mask_broadcast_i32x4(x[t], 0x0F00, at(2));
        x[t] = _mm512_mask_broadcast_i32x4(x[t], 0xF000, at(3));
    }
    __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
}

// K of 16 positions as [steps of 32 dims][16 pairs of dims][16 positions][2].
inline void pack_keys(const char *from, int64_t width, char *to) {
    for (int64_t pair = 0; pair < width / 2; pair += 4) {
        __m512i columns[4];
        transpose(from + pair * 4, width * 2, columns);
        for (int i = 0; i < 4; ++i) _mm512_store_si512(to + (pair + i) * 64, columns[i]);
    }
}

// V of 16 positions, `valid` of them inside the context, as one half of [steps of 32 dims][2 tiles][16 pairs of
// positions][16 dims][2]. The dims of a step are not in order: what unpacking puts into its first tile is 0-3, 8-11,
// 16-19 and 24-27. `between` is called for each pair of positions and step.
template <class Between>
inline void pack_values(const char *from, int64_t width, int64_t valid, char *to, Between between) {
    int64_t row_bytes = width * 2;
    for (int64_t i = 0; i < kStrip; i += 2, to += 64) {
        // What lies behind the context may be NaN, which a weight of 0 would not silence.
        __mmask16 has_first = i < valid ? 0xFFFF : 0, has_second = i + 1 < valid ? 0xFFFF : 0;
        for (int64_t step = 0; step < width / 32; ++step) {
            const char *row = from + i * row_bytes + step * 64;
            __m512i first = _mm512_maskz_loadu_epi32(has_first, row);
            __m512i second = _mm512_maskz_loadu_epi32(has_second, row + row_bytes);
            _mm512_store_si512(to + step * 2048, _mm512_unpacklo_epi16(first, second));
            _mm512_store_si512(to + step * 2048 + 1024, _mm512_unpackhi_epi16(first, second));
            between(i, step);
        }
    }
}

// The strip at `position`, copied to [16][width] with zeros behind head_dim and behind the context.
inline Place copy_strip(const Attention &a, const Piece &piece, int64_t position, int64_t width, bf16 *k, bf16 *v) {
    memset(k, 0, kStrip * width * 2);
    memset(v, 0, kStrip * width * 2);
    int64_t row_bytes = a.head_dim * 2, valid = std::min(piece.context - position, kStrip);
    for (int64_t i = 0; i < valid; ++i) {
        Place place = place_of(a, piece, position + i, row_bytes);
        memcpy(k + i * width, place.k, row_bytes);
        memcpy(v + i * width, place.v, row_bytes);
    }
    return {reinterpret_cast<char *>(k), reinterpret_cast<char *>(v)};
}

}  // namespace attention_tiles
}  // namespace tandem

#endif
