// Which tokens a row has seen, in time and memory that follow the row's history and not the vocabulary.
#pragma once

#include <cstdint>

namespace tandem {

struct Penalty {
    float presence, frequency, repetition;

    bool is_neutral() const { return presence == 0.0f && frequency == 0.0f && repetition == 1.0f; }
    float operator()(float logit, int32_t num_generated) const {
        float result = logit > 0.0f ? logit / repetition : logit * repetition;
        result -= frequency * static_cast<float>(num_generated);
        return result - presence * (num_generated > 0 ? 1.0f : 0.0f);
    }
};

// A set with counts that needs no clearing: token t is in it only if places[t] points at an entry that says so, and
// places[] may start with any contents.
class SeenTokens {
  public:
    struct Entry {
        int32_t token_id;
        int32_t num_generated;
    };

    // places: [vocab_size]; entries: as many as tokens will be added, or vocab_size if that is less
    SeenTokens(uint32_t *places, Entry *entries, int64_t vocab_size)
        : places_(places), entries_(entries), vocab_size_(vocab_size) {}

    void add(int64_t token_id, bool is_generated) {
        if (token_id < 0 || token_id >= vocab_size_) return;
        uint32_t place = places_[token_id];
        if (place >= num_ || entries_[place].token_id != token_id) {
            place = places_[token_id] = num_++;
            entries_[place] = {static_cast<int32_t>(token_id), 0};
        }
        entries_[place].num_generated += is_generated;
    }

    const Entry *begin() const { return entries_; }
    const Entry *end() const { return entries_ + num_; }

  private:
    uint32_t *places_;
    Entry *entries_;
    int64_t vocab_size_;
    uint32_t num_ = 0;
};

}  // namespace tandem
