// Runs a list of ops. Threads stay together for the whole list: between two ops they meet at a barrier that spins for
// some microseconds and then sleeps; between two lists they sleep.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "amx.h"
#include "op.h"

namespace tandem {
namespace {

const Kernel kKernels[] = {embedding, rms_norm, rope_and_write_kv, linear, paged_attention, sample};
constexpr int64_t kNumKernels = sizeof(kKernels) / sizeof(kKernels[0]);

constexpr int kSpins = 2000;  // some 20 microseconds: longer than an op's threads are usually apart

void wait_for_change(std::atomic<uint32_t> &word, uint32_t seen, int spins) {
    for (int spin = 0; spin < spins; ++spin) {
        if (word.load(std::memory_order_acquire) != seen) return;
        __builtin_ia32_pause();
    }
    while (word.load(std::memory_order_acquire) == seen)
        syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t> &word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace

// What the threads of one list share.
class Step {
  public:
    void run(const Op *ops, int64_t num_ops, int index, int count) {
        EnabledTiles tiles;
        for (int64_t i = 0; i < num_ops; ++i) {
            Worker worker(index, count, &next_);
            kKernels[ops[i].code](ops[i], worker);
            if (count > 1) meet(count);
        }
    }

  private:
    // The last to arrive resets the shared counter and lets the others go.
    void meet(int count) {
        uint32_t turn = turn_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            turn_.fetch_add(1, std::memory_order_acq_rel);
            wake_all(turn_);
        } else {
            wait_for_change(turn_, turn, kSpins);
        }
    }

    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> turn_{0};
};

namespace {

// Helper threads, started when first needed and kept. One list runs at a time.
class Pool {
  public:
    void run(const Op *ops, int64_t num_ops, int count) {
        std::lock_guard<std::mutex> guard(mutex_);
        while (helpers_ + 1 < count) start_helper();
        ops_ = ops;
        num_ops_ = num_ops;
        count_ = count;
        if (count > 1) {
            busy_.store(static_cast<uint32_t>(helpers_), std::memory_order_relaxed);
            list_.fetch_add(1, std::memory_order_acq_rel);
            wake_all(list_);
        }
        step_.run(ops, num_ops, 0, count);
        // The caller's memory may go once we return: wait until the last helper has let go of it.
        for (uint32_t busy; (busy = busy_.load(std::memory_order_acquire)) != 0;) wait_for_change(busy_, busy, kSpins);
    }

  private:
    void start_helper() {
        int index = ++helpers_;
        uint32_t seen = list_.load(std::memory_order_acquire);
        std::thread([this, index, seen] { help(index, seen); }).detach();
    }

    void help(int index, uint32_t seen) {
        for (;;) {
            wait_for_change(list_, seen, 0);
            seen = list_.load(std::memory_order_acquire);
            if (index < count_) step_.run(ops_, num_ops_, index, count_);
            busy_.fetch_sub(1, std::memory_order_acq_rel);
            wake_all(busy_);
        }
    }

    std::mutex mutex_;
    Step step_;
    int helpers_ = 0;
    const Op *ops_ = nullptr;
    int64_t num_ops_ = 0;
    int count_ = 1;
    alignas(64) std::atomic<uint32_t> list_{0};
    alignas(64) std::atomic<uint32_t> busy_{0};
};

struct ThreadMemory {
    void *memory = nullptr;
    int64_t size = 0;
    ~ThreadMemory() { free(memory); }
};
thread_local ThreadMemory thread_memory;

}  // namespace

void *Worker::scratch(int64_t bytes) {
    if (bytes > thread_memory.size) {
        free(thread_memory.memory);
        thread_memory.size = (bytes + (1 << 16)) & ~int64_t{63};
        thread_memory.memory = aligned_alloc(64, thread_memory.size);
        if (thread_memory.memory == nullptr) abort();
    }
    return thread_memory.memory;
}

}  // namespace tandem

extern "C" {

// 0, or 1 if a code is unknown (then nothing was run).
int tandem_run(const tandem::Op *ops, int64_t num_ops, int num_threads) {
    for (int64_t i = 0; i < num_ops; ++i)
        if (ops[i].code < 0 || ops[i].code >= tandem::kNumKernels) return 1;
    // Never destroyed: its threads outlive every other destructor of the process.
    static tandem::Pool *pool = new tandem::Pool;
    pool->run(ops, num_ops, num_threads);
    return 0;
}

int64_t tandem_op_size() { return sizeof(tandem::Op); }

}  // extern "C"
