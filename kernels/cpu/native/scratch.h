// A thread's own memory for one op, cut into parts.
#pragma once

#include <cstdint>

namespace tandem {

// Hands out parts of one piece of memory, each 64-byte aligned. Without memory it only measures.
class Carver {
  public:
    explicit Carver(void *memory) : memory_(static_cast<char *>(memory)) {}
    template <class T>
    T *take(int64_t count) {
        T *part = memory_ == nullptr ? nullptr : reinterpret_cast<T *>(memory_ + bytes_);
        bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 63) & ~int64_t{63};
        return part;
    }
    int64_t bytes() const { return bytes_; }

  private:
    char *memory_;
    int64_t bytes_ = 0;
};

}  // namespace tandem
