// Sampling: one token per row of logits.
//
// pointers: logits, temperature, top_k, top_p, min_p, seed, choice, position,
//           penalties (null: none): token_ids, prompt_lens, lens, presence, frequency, repetition,
//           logprob_rows (null: none), out: token_ids, logprobs, top_token_ids, top_logprobs
// sizes: rows, vocab, dtype, logits_stride, penalties' row stride, num_logprob_rows, num_top
#include "op.h"

namespace tandem {

void sample(const Op &, Worker &) {}

}  // namespace tandem
