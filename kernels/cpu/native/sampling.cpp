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
#include <type_traits>

#include "rows.h"
#include "sampling_constraints.h"
#include "sampling_penalties.h"
#include "sampling_philox.h"
#include "sampling_row.h"
#include "sampling_select.h"
#include "scratch.h"

namespace tandem {
namespace {

constexpr float kGreedyTemperature = 1e-5f;

struct Sampling {
    const void *logits;
    const float *temperature;
    const int64_t *top_k;
    const float *top_p, *min_p;
    const uint64_t *seed, *choice, *position;
    const int64_t *histories, *prompt_lens, *history_lens;  // null: no penalties
    const float *presence, *frequency, *repetition;
    const int64_t *logprob_rows;  // null: none
    int64_t *token_ids;
    float *logprobs;
    int64_t *top_token_ids;
    float *top_logprobs;
    const int64_t *bias_token_ids;  // null: no constraints
    const float *biases;
    const int64_t *bias_lens, *mask_rows;
    const uint32_t *masks;
    int64_t rows, vocab_size, dtype, logits_stride, num_logprob_rows, num_top, history_stride, bias_stride, mask_stride;
    bool are_given;

    explicit Sampling(const Op &op)
        : rows(op.sizes[0]), vocab_size(op.sizes[1]), dtype(op.sizes[2]), logits_stride(op.sizes[3]),
          num_logprob_rows(op.sizes[4]), num_top(op.sizes[5]), history_stride(op.sizes[6]), bias_stride(op.sizes[7]),
          mask_stride(op.sizes[8]), are_given(op.sizes[9] != 0) {
        void *const *next = op.pointers;
        auto take = [&](auto &...fields) { ((fields = static_cast<std::decay_t<decltype(fields)>>(*next++)), ...); };
        take(logits, temperature, top_k, top_p, min_p, seed, choice, position);
        take(histories, prompt_lens, history_lens, presence, frequency, repetition);
        take(logprob_rows, token_ids, logprobs, top_token_ids, top_logprobs);
        take(bias_token_ids, biases, bias_lens, mask_rows, masks);
    }
};

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

    void carve(Carver &carver, int64_t vocab_size, int64_t max_history) {
        int64_t padded = vocab_size + 2 * kLanes;
        logits = carver.take<float>(padded);
        values = carver.take<float>(padded);
        ids = carver.take<int32_t>(padded);
        weights = carver.take<int64_t>(padded);
        sums = carver.take<int64_t>(vocab_size / kDrawBlock + 1);
        places = carver.take<uint32_t>(max_history ? vocab_size : 0);
        entries = carver.take<SeenTokens::Entry>(std::min(max_history, vocab_size));
        select.indices = carver.take<int32_t>(padded);
        select.buckets = carver.take<int64_t>(int64_t{kTables} << kBucketBits);
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
    Sampler(const Sampling &sampling, Worker &worker) : s_(sampling) {
        int64_t max_history = s_.histories ? s_.history_stride : 0;
        Carver measure(nullptr);
        memory_.carve(measure, s_.vocab_size, max_history);
        Carver carver(worker.scratch(measure.bytes()));
        memory_.carve(carver, s_.vocab_size, max_history);
    }

    template <class T>
    void sample_row(int64_t row) {
        auto logits = static_cast<const T *>(s_.logits) + row * s_.logits_stride;
        const int64_t *logprob_row = find_logprob_row(row);
        Penalty penalty{};
        bool is_penalised = has_penalty(row, penalty);
        RowConstraint constraint = constraint_of(row);
        bool is_edited = is_penalised || !constraint.is_neutral();
        Largest raw{};
        if (!is_edited || logprob_row) raw = find_largest(logits, s_.vocab_size);
        int64_t &token_id = s_.token_ids[row];
        if (is_edited) {
            copy(logits);
            constraint.add_biases(memory_.logits, s_.vocab_size);
            if (is_penalised) penalise(row, penalty);
            constraint.mask(memory_.logits, s_.vocab_size);
            token_id = choose(memory_.logits, find_largest(memory_.logits, s_.vocab_size), row);
            if (!constraint.allows(token_id)) token_id = constraint.first_allowed(s_.vocab_size);
        } else if (!s_.are_given) {
            token_id = choose(logits, raw, row);
        }
        if (logprob_row) write_logprobs(logits, raw.value, token_id, logprob_row - s_.logprob_rows);
    }

  private:
    const int64_t *find_logprob_row(int64_t row) const {
        if (s_.logprob_rows == nullptr) return nullptr;
        const int64_t *end = s_.logprob_rows + s_.num_logprob_rows;
        const int64_t *found = std::lower_bound(s_.logprob_rows, end, row);
        return found != end && *found == row ? found : nullptr;
    }

    bool has_penalty(int64_t row, Penalty &penalty) const {
        if (s_.histories == nullptr || s_.history_lens[row] <= 0) return false;
        penalty = {s_.presence[row], s_.frequency[row], s_.repetition[row]};
        return !penalty.is_neutral();
    }

    RowConstraint constraint_of(int64_t row) const {
        if (s_.bias_token_ids == nullptr && s_.mask_rows == nullptr) return {};
        int64_t mask_row = s_.mask_rows[row];
        return {s_.bias_token_ids + row * s_.bias_stride, s_.biases + row * s_.bias_stride,
                std::min(s_.bias_lens[row], s_.bias_stride),
                mask_row < 0 ? nullptr : s_.masks + mask_row * s_.mask_stride};
    }

    // The row's logits -> memory_.logits.
    template <class T>
    void copy(const T *logits) {
        for (int64_t i = 0; i < s_.vocab_size; i += kLanes) {
            int n = static_cast<int>(std::min<int64_t>(s_.vocab_size - i, kLanes));
            store(memory_.logits + i, finite(load(logits + i, n)));
        }
    }

    void penalise(int64_t row, const Penalty &penalty) {
        SeenTokens seen(memory_.places, memory_.entries, s_.vocab_size);
        const int64_t *history = s_.histories + row * s_.history_stride;
        int64_t len = std::min(s_.history_lens[row], s_.history_stride);
        for (int64_t i = 0; i < len; ++i) seen.add(history[i], i >= s_.prompt_lens[row]);
        for (const SeenTokens::Entry &entry : seen) {
            float &logit = memory_.logits[entry.token_id];
            logit = finite(penalty(logit, entry.num_generated));
        }
    }

    template <class T>
    int64_t choose(const T *logits, const Largest &largest, int64_t row) {
        float temperature = s_.temperature[row];
        if (!(temperature >= kGreedyTemperature)) return largest.token_id;
        Filters filters(s_.top_k[row], s_.top_p[row], s_.min_p[row], s_.vocab_size);
        uint64_t random = random_bits(s_.seed[row], s_.choice[row], s_.position[row]);
        Scaled<T> scaled(logits, largest.value, temperature);
        if (filters.keep_all()) return draw(scaled, s_.vocab_size, random, memory_.sums);
        // Several passes follow: divide once.
        for (int64_t i = 0; i < s_.vocab_size; i += kLanes) {
            int n = static_cast<int>(std::min<int64_t>(s_.vocab_size - i, kLanes));
            store(memory_.logits + i, scaled.value(i, n));
        }
        return draw_filtered({memory_.logits, scaled.largest(), 1.0f}, s_.vocab_size, filters, random, memory_);
    }

    template <class T>
    void write_logprobs(const T *logits, float largest, int64_t token_id, int64_t place) {
        Scaled<T> row(logits, largest, 1.0f);
        double log_sum = std::log(static_cast<double>(mass(row, 0, s_.vocab_size)) / kFixedOne);
        auto logprob = [=](float logit) { return static_cast<float>(double{logit} - double{largest} - log_sum); };
        s_.logprobs[place] = logprob(finite(to_float(logits[token_id])));
        if (s_.num_top <= 0) return;
        int64_t num_kept = keep_top(logits, row);
        int64_t *top_ids = s_.top_token_ids + place * s_.num_top;
        float *top_logprobs = s_.top_logprobs + place * s_.num_top;
        for (int64_t i = 0; i < num_kept; ++i) {
            top_ids[i] = static_cast<uint32_t>(top()[i]);
            top_logprobs[i] = logprob(value_of(~static_cast<uint32_t>(top()[i] >> 32)));
        }
    }

    // The most likely tokens -> top(): their complemented keys above their ids, so that ascending numbers are descending
    // values and, among equals, ascending ids. Returns how many there are.
    template <class T>
    int64_t keep_top(const T *logits, const Scaled<T> &row) {
        float bound = bound_of_largest(logits, s_.vocab_size, s_.num_top, memory_.values, memory_.select);
        int64_t num = gather(row, s_.vocab_size, bound, -std::numeric_limits<float>::infinity(), memory_);
        const uint32_t *keys = make_keys(memory_.values, num);
        int64_t last = select(keys, num, s_.num_top, one, memory_.select), num_kept = 0;
        for (int64_t i = 0; i < num; ++i)
            if (keys[i] > keys[last] || (keys[i] == keys[last] && i <= last))
                top()[num_kept++] = uint64_t{~keys[i]} << 32 | static_cast<uint32_t>(memory_.ids[i]);
        std::sort(top(), top() + num_kept);
        return num_kept;
    }
    uint64_t *top() { return reinterpret_cast<uint64_t *>(memory_.weights); }

    const Sampling &s_;
    Memory memory_;
};

}  // namespace

void sample(const Op &op, Worker &worker) {
    Sampling sampling(op);
    Sampler sampler(sampling, worker);
    with_type(sampling.dtype, [&](auto type) {
        for (int64_t row; (row = worker.take()) < sampling.rows;) sampler.template sample_row<decltype(type)>(row);
    });
}

}  // namespace tandem
