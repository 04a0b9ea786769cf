// What both forms of paged attention share: the record's fields, the pieces of work, the place of a position's K and V.
#pragma once

#include <algorithm>
#include <vector>

#include "op.h"
#include "scratch.h"

namespace tandem {

// Positions of a KV tile. Tiles start at absolute multiples, so that a token meets the same ones whatever chunk and
// batch it came with.
constexpr int64_t kKvTile = 64;
constexpr float kNoMaximum = -1e30f;  // below every score, yet finite: -inf - -inf would be NaN

struct Attention {
    const char *query, *kv_cache;
    const int64_t *query_starts, *context_lens, *block_tables;
    char *out;
    int64_t rows, num_seqs, num_heads, num_kv_heads, head_dim, block_size, block_bytes, kv_head_bytes, k_offset,
        v_offset, dtype, table_stride, window, query_block;
    float scale, softcap;
    int block_shift;  // block_size is a power of two

    explicit Attention(const Op &op)
        : query(static_cast<const char *>(op.pointers[0])), kv_cache(static_cast<const char *>(op.pointers[1])),
          query_starts(static_cast<const int64_t *>(op.pointers[2])),
          context_lens(static_cast<const int64_t *>(op.pointers[3])),
          block_tables(static_cast<const int64_t *>(op.pointers[4])), out(static_cast<char *>(op.pointers[5])),
          rows(op.sizes[0]), num_seqs(op.sizes[1]), num_heads(op.sizes[2]), num_kv_heads(op.sizes[3]),
          head_dim(op.sizes[4]), block_size(op.sizes[5]), block_bytes(op.sizes[6]), kv_head_bytes(op.sizes[7]),
          k_offset(op.sizes[8]), v_offset(op.sizes[9]), dtype(op.sizes[10]), table_stride(op.sizes[11]),
          window(op.sizes[12]), query_block(std::max<int64_t>(op.sizes[13], 1)),
          scale(static_cast<float>(op.numbers[0])), softcap(static_cast<float>(op.numbers[1])),
          block_shift(__builtin_ctzll(static_cast<unsigned long long>(op.sizes[5]))) {}

    int64_t group() const { return num_heads / num_kv_heads; }
    // The first position that a query at `position` sees; the last is `position` itself.
    int64_t first_seen(int64_t position) const {
        return window > 0 ? std::max<int64_t>(position - window + 1, 0) : 0;
    }
};

// Consecutive tokens of one sequence against one KV head. A row is (token, query head of the group), token-major.
struct Piece {
    int64_t seq, head;
    int64_t first_token;     // row of `query`
    int64_t first_position;  // of that token in its sequence
    int64_t tokens;
    int64_t context;  // of the sequence: what lies behind may be NaN

    int64_t last_position() const { return first_position + tokens - 1; }
};

// All pieces of the op. Threads that share them get smaller ones if there are few, and the costly ones first.
class Pieces {
  public:
    Pieces(const Attention &a, int num_threads) : num_kv_heads_(a.num_kv_heads) {
        int64_t query_block = a.query_block;
        cut(a, query_block);
        if (num_threads == 1) return;
        while (size() < kPiecesPerThread * num_threads && query_block > kSmallestBlock) cut(a, query_block /= 2);
        auto cost = [&](const Piece &p) { return p.tokens * (p.last_position() + 1 - a.first_seen(p.first_position)); };
        std::stable_sort(pieces_.begin(), pieces_.end(),
                         [&](const Piece &x, const Piece &y) { return cost(x) > cost(y); });
    }

    int64_t size() const { return static_cast<int64_t>(pieces_.size()) * num_kv_heads_; }
    Piece operator[](int64_t index) const {
        Piece piece = pieces_[index / num_kv_heads_];
        piece.head = index % num_kv_heads_;
        return piece;
    }

  private:
    static constexpr int64_t kPiecesPerThread = 6, kSmallestBlock = 16;

    void cut(const Attention &a, int64_t query_block) {
        pieces_.clear();
        for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
            int64_t start = a.query_starts[seq], end = a.query_starts[seq + 1], context = a.context_lens[seq];
            for (int64_t token = start; token < end; token += query_block)
                pieces_.push_back(
                    {seq, 0, token, context - (end - token), std::min(query_block, end - token), context});
        }
    }

    int64_t num_kv_heads_;
    std::vector<Piece> pieces_;
};

// Where the piece's K and V of a position begin.
struct Place {
    const char *k, *v;
};
inline Place place_of(const Attention &a, const Piece &piece, int64_t position, int64_t row_bytes) {
    int64_t block = a.block_tables[piece.seq * a.table_stride + (position >> a.block_shift)];
    const char *at = a.kv_cache + block * a.block_bytes + piece.head * a.kv_head_bytes +
                     (position & (a.block_size - 1)) * row_bytes;
    return {at + a.k_offset, at + a.v_offset};
}

}  // namespace tandem
