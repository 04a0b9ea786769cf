// Run in a child process before anything else: does this machine execute what the library was compiled for?
#include "amx.h"
#include "simd.h"

extern "C" int tandem_probe() {
    using namespace tandem;
    // A product of small integers: exact, so the answer is known.
    Vec seven = fma(splat(2.0f), splat(3.0f), splat(1.0f));
    if (lane_sum(seven) != 7.0f * kLanes) return 1;
    bf16 stored[kLanes];
    store(stored, seven);
    if (lane_max(load(stored)) != 7.0f) return 1;
#if defined(__AVX512BF16__)
    __m512bh threes = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x40404040));
    if (_mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), threes, threes)) != 18.0f * 16) return 1;
#endif
#if defined(__AMX_BF16__)
    if (!request_tiles()) return 2;
    TileShapes shapes;
    for (int tile : {0, 1, 2}) shapes.set(tile, 16, 64);
    shapes.use();
    uint16_t ones[16 * 32];
    for (uint16_t &one : ones) one = 0x3F80;
    float sums[16 * 16];
    _tile_zero(0);
    _tile_loadd(1, ones, 64);
    _tile_loadd(2, ones, 64);
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, sums, 64);
    _tile_release();
    for (float sum : sums)
        if (sum != 32.0f) return 3;
#endif
    return 0;
}
