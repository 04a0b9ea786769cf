// Paged attention: softmax(scale q k^T) v over K and V in blocks, for chunks of prompts and decode steps in one call.
//
// A piece of work is a block of one sequence's queries against one KV head, with all query heads that read it. It meets
// its KV tiles, 64 positions each at absolute places, in their order:
//
//     s = scale q k^T;  m' = max(m, max s);  p = exp(s - m');  l = l exp(m - m') + sum p;  o = o exp(m - m') + p v
//
// and ends with o / l. A token's bits depend on its own row and on K and V before it: each product is one chain in
// a fixed order, and a position that a row does not see has a weight of exactly 0: a tile that it does not see at all
// leaves m, l and o as they were, whether visited (for the sake of other rows) or not. What no row sees is not read.
//
// attention_tiles.h: bfloat16 on matrix tiles. attention_vectors.h: everything else.
//
// pointers: query, kv_cache, query_starts, context_lens, block_tables (all int64), out
// sizes: rows, num_seqs, num_heads, num_kv_heads, head_dim, block_size, block_bytes, kv_head_bytes, k_offset, v_offset
//        (bytes of the layer's K and V behind the start of a KV head), dtype, table_stride, window (0: none),
//        query_block (positions that one thread computes together, at most)
// numbers: scale, softcap (0: none)
#include "attention.h"
#include "attention_tiles.h"
#include "attention_vectors.h"
#include "op.h"

namespace tandem {

void paged_attention(const Op &op, Worker &worker) {
    Attention a(op);
    Pieces pieces(a, worker.count);
    switch (a.dtype) {
        case kFloat32: return attention_vectors::attend<float>(a, pieces, worker);
        case kFloat16: return attention_vectors::attend<fp16>(a, pieces, worker);
        default:
#if defined(__AMX_BF16__)
            return attention_tiles::attend(a, pieces, worker);
#else
            return attention_vectors::attend<bf16>(a, pieces, worker);
#endif
    }
}

}  // namespace tandem
