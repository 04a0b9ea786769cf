// What one row is made to prefer, and what it may not choose.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sampling_select.h"

namespace tandem {

class RowConstraint {
  public:
    RowConstraint() = default;
    // mask: bit t % 32 of word t / 32 for token t; null: all may be chosen
    RowConstraint(const int64_t *token_ids, const float *biases, int64_t num_biases, const uint32_t *mask)
        : token_ids_(token_ids), biases_(biases), num_biases_(num_biases), mask_(mask) {}

    bool is_neutral() const { return num_biases_ <= 0 && mask_ == nullptr; }
    bool allows(int64_t token_id) const { return !mask_ || mask_[token_id >> 5] >> (token_id & 31) & 1; }

    void add_biases(float *logits, int64_t vocab_size) const {
        for (int64_t i = 0; i < num_biases_; ++i) {
            int64_t token_id = token_ids_[i];
            if (token_id >= 0 && token_id < vocab_size) logits[token_id] = finite(logits[token_id] + biases_[i]);
        }
    }

    // Whole words are mostly all or nothing.
    void mask(float *logits, int64_t vocab_size) const {
        if (!mask_) return;
        for (int64_t start = 0; start < vocab_size; start += 32) {
            uint32_t word = mask_[start >> 5];
            if (word == ~uint32_t{0}) continue;
            int64_t count = std::min<int64_t>(32, vocab_size - start);
            for (int64_t i = 0; i < count; ++i)
                logits[start + i] = word >> i & 1 ? logits[start + i] : kLowest;
        }
    }

    // The lowest id that may be chosen; 0 if none may.
    int64_t first_allowed(int64_t vocab_size) const {
        for (int64_t start = 0; start < vocab_size; start += 32)
            if (uint32_t word = mask_[start >> 5]) {
                int64_t found = start + __builtin_ctz(word);
                return found < vocab_size ? found : 0;
            }
        return 0;
    }

  private:
    const int64_t *token_ids_ = nullptr;
    const float *biases_ = nullptr;
    int64_t num_biases_ = 0;
    const uint32_t *mask_ = nullptr;
};

}  // namespace tandem
