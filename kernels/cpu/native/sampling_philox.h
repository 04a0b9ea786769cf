// Philox4x32-10, as kernels/philox.py has it: no state, one number per (seed, choice, position).
#pragma once

#include <cstdint>

namespace tandem {

// 53 random bits. Key: the seed's low and high word; counter: the position's low and high word, the choice, 0.
inline uint64_t random_bits(uint64_t seed, uint64_t choice, uint64_t position) {
    uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(position >> 32);
    uint32_t c2 = static_cast<uint32_t>(choice), c3 = 0;
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        uint64_t product0 = uint64_t{0xD2511F53} * c0, product1 = uint64_t{0xCD9E8D57} * c2;
        c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(product1);
        c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(product0);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return (uint64_t{c0 >> 5} << 26) | (c1 >> 6);
}

}  // namespace tandem
