// Sampling: one token per row of logits.
//
// pointers: logits, temperature, top_k, top_p, min_p, seed, choice, position,
//           penalties (null: none): token_ids, prompt_lens, lens, presence, frequency, repetition,
//           logprob_rows (null: none), out: token_ids, logprobs, top_token_ids, top_logprobs,
//           constraints (null: none): bias_token_ids, biases, bias_lens, mask_rows, masks
// sizes: rows, vocab, dtype, logits_stride, num_logprob_rows, num_top, row strides of penalties, biases and masks,
//        are_given (nothing is chosen: token_ids holds the tokens whose logprobs are wanted)
//
// vocab <= 2^21 and num_top <= vocab. A row is one thread's work.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "op.h"
#include "sampling_constraints.h"
#include "sampling_penalties.h"
#include "sampling_philox.h"
#include "sampling_row.h"
#include "sampling_select.h"
#include "simd.h"

namespace tandem {
namespace {

constexpr float kGreedyTemperature = 1e-5f;

// Calls `body` with a value of the storage type.
template <class Body>
void with_type(int64_t dtype, Body body) {
    if (dtype == kFloat32) return body(float{});
    if (dtype == kBFloat16) return body(bf16{});
    body(fp16{});
}

// A thread's memory for one row, cut from one piece. Little of it is touched unless a row's filters keep most tokens.
struct Memory {
    float *logits;  // with penalties and constraints, or scaled
    float *values;  // of the candidates; their keys take the same place
    int32_t *ids;
    int64_t *weights;
    int64_t *sums;
    uint32_t *places;
    SeenTokens::Entry *entries;
    SelectMemory select;

    // base null: only counts.
    static int64_t carve(char *base, int64_t vocab_size, int64_t max_history, Memory &memory) {
        int64_t used = 0;
        auto take = [&](auto *&pointer, int64_t num) {
            auto address = reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(used);
            pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(address);
            used += (num * static_cast<int64_t>(sizeof(*pointer)) + 63) & ~int64_t{63};
        };
        int64_t padded = vocab_size + 2 * kLanes;
        take(memory.logits, padded);
        take(memory.values, padded);
        take(memory.ids, padded);
        take(memory.weights, padded);
        take(memory.sums, vocab_size / kDrawBlock + 1);
        take(memory.places, max_history ? vocab_size : 0);
        take(memory.entries, std::min(max_history, vocab_size));
        take(memory.select.indices, padded);
        take(memory.select.buckets, int64_t{kTables} << kBucketBits);
        return used;
    }
};

struct Filters {
    int64_t top_k;  // 0: all
    float top_p, min_p;

    // Whatever stands in a row that pads a batch, the largest token stays.
    Filters(int64_t top_k, float top_p, float min_p, int64_t vocab_size)
        : top_k(top_k > 0 && top_k < vocab_size ? top_k : 0),
          top_p(top_p < 1.0f ? std::max(top_p, 0.0f) : 1.0f),
          min_p(min_p > 0.0f ? std::min(min_p, 1.0f) : 0.0f) {}

    bool keep_all() const { return top_k == 0 && top_p == 1.0f && min_p == 0.0f; }
};

// Elements with value >= bound and value - largest >= gap, in the order of their ids. Returns how many.
template <class T>
int64_t gather(const Scaled<T> &row, int64_t count, float bound, float gap, const Memory &memory) {
    int64_t num = 0;
    Vec least = splat(bound), least_gap = splat(gap), largest = splat(row.largest());
    for (int64_t i = 0; i < count; i += kLanes) {
        int n = static_cast<int>(std::min<int64_t>(count - i, kLanes));
        Vec value = row.value(i, n);
        LaneBits keep = at_least(value, least) & at_least(value - largest, least_gap) & first_bits(n);
        if (keep) num += append(memory.values + num, memory.ids + num, value, static_cast<int32_t>(i), keep);
    }
    return num;
}

int64_t one(int64_t) { return 1; }

// Candidates are chosen by the logarithm of a weight; this is more than it may be off.
constexpr float kSlack = 0.01f;

// How far below the largest value a token of interest can be, if top-p is the only filter and the row has this mass:
// it is removed for certain if even `count` of its kind have less mass than top-p cuts off.
float gap_of_top_p(float top_p, int64_t whole, int64_t count) {
    double cut_off = (1.0 - static_cast<double>(top_p)) * static_cast<double>(whole) / kFixedOne;
    return static_cast<float>(std::log(cut_off / static_cast<double>(count))) - kSlack;
}

// Sets the weights of candidates with lower keys to 0. No branches: they would be mispredicted.
void keep_down_to(uint32_t least, const uint32_t *keys, int64_t *weights, int64_t start, int64_t end) {
    for (int64_t i = start; i < end; ++i) weights[i] &= -static_cast<int64_t>(keys[i] >= least);
}

// Gathers candidates, with a weight of 0 for those that a filter removes. Returns how many candidates there are.
int64_t filter(const Scaled<float> &row, int64_t count, const Filters &filters, const Memory &memory) {
    float bound = kLowest, gap = -std::numeric_limits<float>::infinity();
    int64_t whole = 0;  // the mass that top-p sees; behind another filter the candidates hold all of it
    if (filters.top_k) bound = bound_of_largest(memory.logits, count, filters.top_k, memory.values, memory.select);
    if (filters.min_p > 0.0f) gap = std::log(filters.min_p) - kSlack;
    if (filters.top_k == 0 && filters.min_p == 0.0f) {
        whole = mass(row, 0, count);
        gap = gap_of_top_p(filters.top_p, whole, count);
    }
    int64_t num = gather(row, count, bound, gap, memory);
    Vec largest = splat(row.largest()), min_p = splat(filters.min_p);
    for (int64_t i = 0; i < num; i += kLanes) {
        Vec weight = exp(load(memory.values + i) - largest);
        store_fixed(memory.weights + i, keep_at_least(weight, min_p));
    }
    const uint32_t *keys = make_keys(memory.values, num);
    int64_t *weights = memory.weights;
    if (filters.top_k && num > filters.top_k) {
        uint32_t least = keys[select(keys, num, filters.top_k, one, memory.select)];
        keep_down_to(least, keys, weights, 0, num);
    }
    if (filters.top_p < 1.0f) {
        if (whole == 0) whole = std::accumulate(weights, weights + num, int64_t{0});
        auto limit = static_cast<int64_t>(std::ceil(static_cast<double>(filters.top_p) * static_cast<double>(whole)));
        int64_t last = select(
            keys, num, std::max<int64_t>(1, limit), [=](int64_t i) { return weights[i]; }, memory.select);
        keep_down_to(keys[last], keys, weights, 0, last + 1);
        keep_down_to(keys[last] + 1, keys, weights, last + 1, num);
    }
    return num;
}

int64_t draw_filtered(const Scaled<float> &row, int64_t count, const Filters &filters, uint64_t random,
                      const Memory &memory) {
    int64_t num = filter(row, count, filters, memory);
    int64_t whole = std::accumulate(memory.weights, memory.weights + num, int64_t{0});
    return memory.ids[first_beyond(memory.weights, num, target_of(random, whole))];
}

class Sampler {
  public:
    Sampler(const Op &op, Worker &worker) : op_(op), vocab_size_(op.sizes[1]) {
        int64_t max_history = op.pointers[8] ? op.sizes[6] : 0;
        int64_t bytes = Memory::carve(nullptr, vocab_size_, max_history, memory_);
        Memory::carve(static_cast<char *>(worker.scratch(bytes)), vocab_size_, max_history, memory_);
    }

    template <class T>
    void sample_row(int64_t row) {
        auto logits = static_cast<const T *>(op_.pointers[0]) + row * op_.sizes[3];
        const int64_t *logprob_row = find_logprob_row(row);
        Penalty penalty{};
        bool is_penalised = has_penalty(row, penalty), is_given = op_.sizes[9];
        RowConstraint constraint = constraint_of(row);
        bool is_edited = is_penalised || !constraint.is_neutral();
        Largest raw{};
        if (!is_edited || logprob_row) raw = find_largest(logits, vocab_size_);
        int64_t &token_id = output<int64_t>(15)[row];
        if (is_edited) {
            copy(logits);
            constraint.add_biases(memory_.logits, vocab_size_);
            if (is_penalised) penalise(row, penalty);
            constraint.mask(memory_.logits, vocab_size_);
            token_id = choose(memory_.logits, find_largest(memory_.logits, vocab_size_), row);
            if (!constraint.allows(token_id)) token_id = constraint.first_allowed(vocab_size_);
        } else if (!is_given) {
            token_id = choose(logits, raw, row);
        }
        if (logprob_row) write_logprobs(logits, raw.value, token_id, logprob_row - input<int64_t>(14));
    }

  private:
    template <class V>
    const V *input(int index) const {
        return static_cast<const V *>(op_.pointers[index]);
    }
    template <class V>
    V *output(int index) const {
        return static_cast<V *>(op_.pointers[index]);
    }

    const int64_t *find_logprob_row(int64_t row) const {
        auto rows = input<int64_t>(14);
        if (rows == nullptr) return nullptr;
        const int64_t *found = std::lower_bound(rows, rows + op_.sizes[4], row);
        return found != rows + op_.sizes[4] && *found == row ? found : nullptr;
    }

    bool has_penalty(int64_t row, Penalty &penalty) const {
        if (op_.pointers[8] == nullptr || input<int64_t>(10)[row] <= 0) return false;
        penalty = {input<float>(11)[row], input<float>(12)[row], input<float>(13)[row]};
        return !penalty.is_neutral();
    }

    RowConstraint constraint_of(int64_t row) const {
        if (op_.pointers[19] == nullptr && op_.pointers[22] == nullptr) return {};
        int64_t mask_row = input<int64_t>(22)[row];
        return {input<int64_t>(19) + row * op_.sizes[7], input<float>(20) + row * op_.sizes[7],
                std::min(input<int64_t>(21)[row], op_.sizes[7]),
                mask_row < 0 ? nullptr : input<uint32_t>(23) + mask_row * op_.sizes[8]};
    }

    // The row's logits -> memory_.logits.
    template <class T>
    void copy(const T *logits) {
        for (int64_t i = 0; i < vocab_size_; i += kLanes) {
            int n = static_cast<int>(std::min<int64_t>(vocab_size_ - i, kLanes));
            store(memory_.logits + i, finite(load(logits + i, n)));
        }
    }

    void penalise(int64_t row, const Penalty &penalty) {
        SeenTokens seen(memory_.places, memory_.entries, vocab_size_);
        const int64_t *history = input<int64_t>(8) + row * op_.sizes[6];
        int64_t prompt_len = input<int64_t>(9)[row], len = std::min(input<int64_t>(10)[row], op_.sizes[6]);
        for (int64_t i = 0; i < len; ++i) seen.add(history[i], i >= prompt_len);
        for (const SeenTokens::Entry &entry : seen) {
            float &logit = memory_.logits[entry.token_id];
            logit = finite(penalty(logit, entry.num_generated));
        }
    }

    template <class T>
    int64_t choose(const T *logits, const Largest &largest, int64_t row) {
        float temperature = input<float>(1)[row];
        if (!(temperature >= kGreedyTemperature)) return largest.token_id;
        Filters filters(input<int64_t>(2)[row], input<float>(3)[row], input<float>(4)[row], vocab_size_);
        uint64_t random = random_bits(input<uint64_t>(5)[row], input<uint64_t>(6)[row], input<uint64_t>(7)[row]);
        Scaled<T> scaled(logits, largest.value, temperature);
        if (filters.keep_all()) return draw(scaled, vocab_size_, random, memory_.sums);
        // Several passes follow: divide once.
        for (int64_t i = 0; i < vocab_size_; i += kLanes) {
            int n = static_cast<int>(std::min<int64_t>(vocab_size_ - i, kLanes));
            store(memory_.logits + i, scaled.value(i, n));
        }
        return draw_filtered({memory_.logits, scaled.largest(), 1.0f}, vocab_size_, filters, random, memory_);
    }

    template <class T>
    void write_logprobs(const T *logits, float largest, int64_t token_id, int64_t place) {
        Scaled<T> row(logits, largest, 1.0f);
        double log_sum = std::log(static_cast<double>(mass(row, 0, vocab_size_)) / kFixedOne);
        auto logprob = [=](float logit) { return static_cast<float>(double{logit} - double{largest} - log_sum); };
        output<float>(16)[place] = logprob(finite(to_float(logits[token_id])));
        int64_t num_top = std::min(op_.sizes[5], vocab_size_);
        if (num_top <= 0) return;
        float bound = bound_of_largest(logits, vocab_size_, num_top, memory_.values, memory_.select);
        int64_t num = gather(row, vocab_size_, bound, -std::numeric_limits<float>::infinity(), memory_);
        const uint32_t *keys = make_keys(memory_.values, num);
        int64_t last = select(keys, num, num_top, one, memory_.select), num_kept = 0;
        // Ascending in this order: descending values, then ascending ids.
        auto order = reinterpret_cast<uint64_t *>(memory_.weights);
        for (int64_t i = 0; i < num; ++i)
            if (keys[i] > keys[last] || (keys[i] == keys[last] && i <= last))
                order[num_kept++] = uint64_t{~keys[i]} << 32 | static_cast<uint32_t>(memory_.ids[i]);
        std::sort(order, order + num_kept);
        int64_t *top_ids = output<int64_t>(17) + place * op_.sizes[5];
        float *top_logprobs = output<float>(18) + place * op_.sizes[5];
        for (int64_t i = 0; i < num_kept; ++i) {
            top_ids[i] = static_cast<uint32_t>(order[i]);
            top_logprobs[i] = logprob(value_of(~static_cast<uint32_t>(order[i] >> 32)));
        }
    }

    const Op &op_;
    int64_t vocab_size_;
    Memory memory_;
};

}  // namespace

void sample(const Op &op, Worker &worker) {
    Sampler sampler(op, worker);
    with_type(op.sizes[2], [&](auto type) {
        for (int64_t row; (row = worker.take()) < op.sizes[0];) sampler.template sample_row<decltype(type)>(row);
    });
}

}  // namespace tandem
