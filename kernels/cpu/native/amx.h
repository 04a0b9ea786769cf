// Matrix tiles (AMX). Without them this file is almost empty.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tandem {

#if defined(__AMX_BF16__)

// Shape of the eight tile registers, as LDTILECFG reads it.
struct alignas(64) TileShapes {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int num_bytes) {
        rows[tile] = static_cast<uint8_t>(num_rows);
        row_bytes[tile] = static_cast<uint16_t>(num_bytes);
    }
    // By hand: the intrinsic tells the compiler of the first 8 bytes only.
    void use() const { asm volatile("ldtilecfg %0" : : "m"(*this)); }
};

// Ask the kernel once per process for the right to use tile data; false: refused.
inline bool request_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return granted;
}

// While it lives this thread may use tiles; afterwards a context switch no longer saves 8 KiB of them.
struct EnabledTiles {
    EnabledTiles() { request_tiles(); }
    ~EnabledTiles() { _tile_release(); }
};

#else

struct EnabledTiles {
    ~EnabledTiles() {}
};

#endif

}  // namespace tandem
