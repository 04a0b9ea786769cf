// Paged attention.
//
// pointers: query, kv_cache, query_starts, context_lens, block_tables (all int64), out
// sizes: rows, num_seqs, num_heads, num_kv_heads, head_dim, block_size, block_bytes, kv_head_bytes, k_offset, v_offset
//        (bytes of the layer's K and V behind the start of a KV head), dtype, table_stride, window (0: none), query_block
// numbers: scale, softcap (0: none)
#include "attention.h"
#include "attention_tiles.h"
#include "attention_vectors.h"
#include "op.h"

namespace tandem {

void paged_attention(const Op &op, Worker &worker) {
    Attention a(op);
    Pieces pieces(a, worker.count > 1);
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
