// Tile registers by number, as template arguments. The compiler's own intrinsics want literals, and do not tell it that
// they read and write memory.
#pragma once

#if defined(__AMX_BF16__)

#include <cstdint>

#include "amx.h"

namespace tandem {
namespace attention_tiles {

template <int kTile>
inline void clear() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

template <int kTile>
inline void load_tile(const void *from, int64_t row_bytes) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(from), "r"(row_bytes) : "memory");
}

template <int kTile>
inline void store_tile(void *to, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(to), "r"(row_bytes) : "memory");
}

// kSums += kRows kColumns
template <int kSums, int kRows, int kColumns>
inline void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kRows), "i"(kColumns));
}

}  // namespace attention_tiles
}  // namespace tandem

#endif
