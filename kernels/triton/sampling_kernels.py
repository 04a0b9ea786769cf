"""The kernels of sampling, launched by `sampling.py`: one program per row passes over the vocabulary, and never sorts.

Thresholds (the k-th largest logit, the last one inside top-p) are found digit by digit in the integers that order like
the floats: the largest t such that enough tokens, or enough weight, is at or above t. Eight passes, each of which tries
the sixteen values of four bits. Weights are summed as integers there (units of 2^-44 of the largest weight), which
makes the sum exact and its order meaningless. The draw itself sums in float64, block after block, in the order of ids.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.ops import GREEDY_TEMPERATURE
from tandem.kernels.triton.sampling_edits import LARGEST, add_biases, clean, mask, penalise, replace_forbidden

_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_DIGIT_BITS = tl.constexpr(4)
_NUM_DIGITS = tl.constexpr(16)
_NUM_PASSES = tl.constexpr(8)
_FIRST_UNIT = tl.constexpr(1 << 28)
_LOWEST_KEY = tl.constexpr(-(1 << 31))
_WEIGHT_ONE = tl.constexpr(float(1 << 44))
_MASK = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _key(values: tl.tensor) -> tl.tensor:
    """Integers that order like the floats. float32 -> int64 in [-2^31, 2^31)"""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _weigh(scaled: tl.tensor, maximum: tl.tensor) -> tl.tensor:
    """exp(scaled - maximum), 1 for the maximum itself."""
    return tl.where(scaled == maximum, 1.0, tl.exp(scaled - maximum))


@triton.jit
def _load_scaled(row_ptr: tl.tensor, ids: tl.tensor, vocab_size: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    return tl.load(row_ptr + ids, mask=ids < vocab_size, other=0.0) / temperature


@triton.jit
def _multiply_words(word: tl.tensor, multiplier: tl.constexpr) -> tl.tensor:
    """High and low word of the product of 32-bit words in uint64."""
    product = word * multiplier
    return product >> 32, product & _MASK


@triton.jit
def uniform(seed: tl.tensor, choice: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The number in [0, 1) of `philox.uniform`, from int64 scalars. float64"""
    c0 = position.to(tl.uint64, bitcast=True) & _MASK
    c1 = position.to(tl.uint64, bitcast=True) >> 32
    c2 = choice.to(tl.uint64, bitcast=True) & _MASK
    c3 = c2 & 0
    k0 = seed.to(tl.uint64, bitcast=True) & _MASK
    k1 = seed.to(tl.uint64, bitcast=True) >> 32
    for _ in tl.static_range(10):
        high0, low0 = _multiply_words(c0, 0xD2511F53)
        high1, low1 = _multiply_words(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + 0x9E3779B9) & _MASK
        k1 = (k1 + 0xBB67AE85) & _MASK
    bits = ((c0 >> 5) << 26) | (c1 >> 6)
    return bits.to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _find_count(
    row_ptr: tl.tensor, vocab_size: tl.tensor, temperature: tl.tensor, wanted: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """The largest key t such that at least `wanted` tokens have keys >= t: the key of the wanted-th largest."""
    digits = tl.arange(0, _NUM_DIGITS).to(tl.int64)
    threshold = wanted * 0 + _LOWEST_KEY
    unit = wanted * 0 + _FIRST_UNIT
    for _ in range(_NUM_PASSES):
        tried = threshold + digits * unit
        counts = tl.zeros((_NUM_DIGITS,), tl.int64)
        for first in range(0, vocab_size, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            key = _key(_load_scaled(row_ptr, ids, vocab_size, temperature))
            above = (key[None, :] >= tried[:, None]) & (ids < vocab_size)[None, :]
            counts += tl.sum(above.to(tl.int32), 1).to(tl.int64)
        threshold += (tl.maximum(tl.sum((counts >= wanted).to(tl.int64), 0), 1) - 1) * unit
        unit = unit >> _DIGIT_BITS
    return threshold


@triton.jit
def _find_weight(
    row_ptr: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    maximum: tl.tensor,
    kth_key: tl.tensor,
    min_p: tl.tensor,
    top_p: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The key of the last token inside top-p, and how many of its equals are inside."""
    digits = tl.arange(0, _NUM_DIGITS).to(tl.int64)
    threshold = kth_key * 0 + _LOWEST_KEY
    unit = kth_key * 0 + _FIRST_UNIT
    wanted = top_p * 0  # nothing is known before the first pass, whose digit 0 has all the weight
    above_weight = kth_key * 0
    for _ in range(_NUM_PASSES):
        tried = threshold + digits * unit
        sums = tl.zeros((_NUM_DIGITS,), tl.int64)
        for first in range(0, vocab_size, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            scaled = _load_scaled(row_ptr, ids, vocab_size, temperature)
            weight = _weigh(scaled, maximum)
            key = _key(scaled)
            kept = (ids < vocab_size) & (key >= kth_key) & (weight >= min_p)
            units = tl.where(kept, (weight.to(tl.float64) * _WEIGHT_ONE).to(tl.int64), 0)
            sums += tl.sum(tl.where(key[None, :] >= tried[:, None], units[None, :], 0), 1)
        if unit == _FIRST_UNIT:
            wanted = top_p * tl.max(sums, 0).to(tl.float64)
        digit = tl.maximum(tl.sum((sums.to(tl.float64) >= wanted).to(tl.int64), 0), 1) - 1
        # what is above the digit's values; with the last digit, what is above the threshold itself
        higher = tl.max(tl.where(digits == digit + 1, sums, 0), 0)
        above_weight = tl.where(digit + 1 < _NUM_DIGITS, higher, above_weight)
        threshold += digit * unit
        unit = unit >> _DIGIT_BITS
    return threshold, above_weight, wanted


@triton.jit
def _kept_weights(
    row_ptr: tl.tensor,
    ids: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    maximum: tl.tensor,
    kth_key: tl.tensor,
    min_p: tl.tensor,
    last_key: tl.tensor,
    num_last: tl.tensor,
    num_seen: tl.tensor,
) -> tl.tensor:
    """float64 weights of one block, 0 for what the filters remove; and the number of equals of last_key so far."""
    scaled = _load_scaled(row_ptr, ids, vocab_size, temperature)
    weight = _weigh(scaled, maximum)
    key = _key(scaled)
    inside = ids < vocab_size
    is_last = ((key == last_key) & inside).to(tl.int32)
    rank = num_seen + tl.cumsum(is_last, 0) - is_last
    in_top_p = (key > last_key) | ((key == last_key) & (rank < num_last))
    kept = inside & (key >= kth_key) & (weight >= min_p) & in_top_p
    return tl.where(kept, weight, 0.0).to(tl.float64), num_seen + tl.sum(is_last, 0)


@triton.jit
def _draw(
    row_ptr: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    maximum: tl.tensor,
    kth_key: tl.tensor,
    min_p: tl.tensor,
    last_key: tl.tensor,
    num_last: tl.tensor,
    number: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The first token at which the running sum of kept weights exceeds number * (the whole sum)."""
    whole = number * 0
    num_seen = vocab_size * 0
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        weights, num_seen = _kept_weights(
            row_ptr, ids, vocab_size, temperature, maximum, kth_key, min_p, last_key, num_last, num_seen
        )
        whole += tl.sum(weights, 0)
    target = number * whole
    running = number * 0
    num_seen = vocab_size * 0
    token = vocab_size * 0
    is_found = vocab_size < 0
    for first in range(0, vocab_size, BLOCK):
        if not is_found:
            ids = first + tl.arange(0, BLOCK)
            weights, num_seen = _kept_weights(
                row_ptr, ids, vocab_size, temperature, maximum, kth_key, min_p, last_key, num_last, num_seen
            )
            # should rounding leave no token above the target, the last one that is kept is taken
            last_kept = tl.max(tl.where(weights > 0, ids, -1), 0)
            token = tl.where(last_kept >= 0, last_kept, token)
            after = running + tl.sum(weights, 0)
            if after > target:
                exceeds = (running + tl.cumsum(weights, 0) > target) & (weights > 0)
                first_above = tl.min(tl.where(exceeds, ids, vocab_size), 0)
                token = tl.where(first_above < vocab_size, first_above, token)
                is_found = vocab_size > 0
            running = after
    return token


@triton.jit
def _argmax(row_ptr: tl.tensor, vocab_size: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The largest value and the lowest id that has it."""
    best = float("-inf")
    best_id = vocab_size * 0
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        values = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        largest = tl.max(values, 0)
        if largest > best:
            best_id = tl.min(tl.where(values == largest, ids, vocab_size), 0)
            best = largest
    return best, best_id


@triton.jit(
    do_not_specialize=["history_stride", "bias_stride", "mask_stride"],
    do_not_specialize_on_alignment=[
        "temperature_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "min_p_ptr",
        "seed_ptr",
        "choice_ptr",
        "position_ptr",
        "history_ptr",
        "prompt_len_ptr",
        "history_len_ptr",
        "presence_ptr",
        "frequency_ptr",
        "repetition_ptr",
        "bias_token_ptr",
        "bias_ptr",
        "bias_len_ptr",
        "mask_row_ptr",
        "mask_ptr",
        "token_ptr",
    ],
)
def sample_kernel(
    logits_ptr: tl.tensor,
    scratch_ptr: tl.tensor,
    count_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    choice_ptr: tl.tensor,
    position_ptr: tl.tensor,
    history_ptr: tl.tensor,
    prompt_len_ptr: tl.tensor,
    history_len_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    bias_token_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    bias_len_ptr: tl.tensor,
    mask_row_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    token_ptr: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    history_stride: tl.tensor,
    bias_stride: tl.tensor,
    mask_stride: tl.tensor,
    HAS_PENALTIES: tl.constexpr,
    HAS_CONSTRAINTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row, see `ops.Ops.sample`. Grid: (rows,)."""
    row = tl.program_id(0)
    wide_row = row.to(tl.int64)
    logits_row_ptr = logits_ptr + wide_row * logits_stride
    scratch_row_ptr = scratch_ptr + wide_row * vocab_size
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        logits = clean(tl.load(logits_row_ptr + ids, mask=ids < vocab_size, other=0.0))
        tl.store(scratch_row_ptr + ids, logits, mask=ids < vocab_size)
    tl.debug_barrier()
    if HAS_CONSTRAINTS:
        num_biases = tl.load(bias_len_ptr + row).to(tl.int32)
        if num_biases > 0:
            bias_start = wide_row * bias_stride
            add_biases(scratch_row_ptr, bias_token_ptr + bias_start, bias_ptr + bias_start, num_biases, BLOCK)
            tl.debug_barrier()
    if HAS_PENALTIES:
        history_len = tl.load(history_len_ptr + row).to(tl.int32)
        if history_len > 0:
            penalise(
                scratch_row_ptr,
                count_ptr + wide_row * vocab_size,
                history_ptr + wide_row * history_stride,
                tl.load(prompt_len_ptr + row).to(tl.int32),
                history_len,
                tl.load(presence_ptr + row),
                tl.load(frequency_ptr + row),
                tl.load(repetition_ptr + row),
                BLOCK,
            )
            tl.debug_barrier()
    if HAS_CONSTRAINTS:
        mask_row = tl.load(mask_row_ptr + row)
        one_mask_ptr = mask_ptr + tl.maximum(mask_row, 0) * mask_stride
        if mask_row >= 0:
            mask(scratch_row_ptr, one_mask_ptr, vocab_size, BLOCK)
            tl.debug_barrier()
    best, token = _argmax(scratch_row_ptr, vocab_size, BLOCK)
    temperature = tl.load(temperature_ptr + row)
    if temperature >= _GREEDY:
        maximum = best / temperature
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row).to(tl.float64)
        min_p = tl.load(min_p_ptr + row)
        kth_key = top_k * 0 + _LOWEST_KEY
        if (top_k > 0) & (top_k < vocab_size):
            kth_key = _find_count(scratch_row_ptr, vocab_size, temperature, top_k, BLOCK)
        last_key = top_k * 0 + _LOWEST_KEY - 1  # every key is above it
        num_last = vocab_size * 0
        if top_p < 1:
            last_key, above_weight, wanted = _find_weight(
                scratch_row_ptr, vocab_size, temperature, maximum, kth_key, min_p, top_p, BLOCK
            )
            num_last = _num_equals(last_key, above_weight, wanted, maximum)
        number = uniform(tl.load(seed_ptr + row), tl.load(choice_ptr + row), tl.load(position_ptr + row))
        token = _draw(
            scratch_row_ptr, vocab_size, temperature, maximum, kth_key, min_p, last_key, num_last, number, BLOCK
        )
    if HAS_CONSTRAINTS:  # noqa: SIM102  the compiler knows this, and only the device the other
        if mask_row >= 0:
            token = replace_forbidden(token, one_mask_ptr, vocab_size, BLOCK)
    tl.store(token_ptr + row, token.to(tl.int64))


@triton.jit
def _num_equals(last_key: tl.tensor, above_weight: tl.tensor, wanted: tl.tensor, maximum: tl.tensor) -> tl.tensor:
    """How many tokens of key last_key are needed to bring above_weight up to wanted; at least one. int32"""
    bits = last_key.to(tl.int32)
    value = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    weight = (_weigh(value, maximum).to(tl.float64) * _WEIGHT_ONE).to(tl.int64)
    missing = (wanted - above_weight.to(tl.float64)) / tl.maximum(weight, 1).to(tl.float64)
    return tl.maximum(tl.minimum(tl.ceil(missing), 2147483647.0), 1.0).to(tl.int32)


@triton.jit(
    do_not_specialize=["num_top"],
    do_not_specialize_on_alignment=["row_ptr", "token_ptr", "logprob_ptr", "top_id_ptr", "top_logprob_ptr"],
)
def logprob_kernel(
    logits_ptr: tl.tensor,
    row_ptr: tl.tensor,
    token_ptr: tl.tensor,
    logprob_ptr: tl.tensor,
    top_id_ptr: tl.tensor,
    top_logprob_ptr: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    num_top: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """log_softmax at the chosen token and at the most likely ones of one row. Grid: (rows of row_ptr,)."""
    place = tl.program_id(0)
    row = tl.load(row_ptr + place)
    logits_row_ptr = logits_ptr + row * logits_stride
    maximum = -LARGEST
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        logits = clean(tl.load(logits_row_ptr + ids, mask=ids < vocab_size, other=float("-inf")))
        maximum = tl.maximum(maximum, tl.max(logits, 0))
    total = (vocab_size * 0).to(tl.float64)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        logits = clean(tl.load(logits_row_ptr + ids, mask=ids < vocab_size, other=0.0))
        total += tl.sum(tl.where(ids < vocab_size, tl.exp(logits - maximum), 0.0).to(tl.float64), 0)
    log_total = tl.log(total.to(tl.float32))
    chosen = clean(tl.load(logits_row_ptr + tl.load(token_ptr + row)))
    tl.store(logprob_ptr + place, chosen - maximum - log_total)
    previous = float("inf")
    previous_id = vocab_size * 0
    for index in range(num_top):
        best = float("-inf")
        best_id = vocab_size
        for first in range(0, vocab_size, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            logits = clean(tl.load(logits_row_ptr + ids, mask=ids < vocab_size, other=0.0))
            logprobs = logits - maximum - log_total
            is_next = (logprobs < previous) | ((logprobs == previous) & (ids > previous_id))
            is_next = is_next & (ids < vocab_size)
            largest = tl.max(tl.where(is_next, logprobs, float("-inf")), 0)
            largest_id = tl.min(tl.where(is_next & (logprobs == largest), ids, vocab_size), 0)
            if (largest > best) | ((best_id == vocab_size) & (largest_id < vocab_size)):
                best = largest
                best_id = largest_id
        tl.store(top_id_ptr + place * num_top + index, best_id.to(tl.int64))
        tl.store(top_logprob_ptr + place * num_top + index, best)
        previous = best
        previous_id = best_id
