// Who attends to what: the rows of a step cut into parts, each of them the work of one thread.
//
// Station: `plan_of` is called by attention.h for one layer and by layers.h once for all; the other headers of attention
// go by what it says. It knows tables, and nothing of K and V.
//
// Rows of one token whose tables begin with the same blocks (a prefix that was cached) lie side by side in a part, so that
// attention_pairs.h reads what they share once for all of them; attention_floats.h goes over a part row by row. After
// Hydragen (Juravsky et al., 2024) and the cascade attention of FlashInfer and vLLM, which attend to the prefix apart and
// merge two results; here a row goes over its keys in the same order as alone, and gets the same to the last bit.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "vectors.h"

namespace {

constexpr int TILE = 2 * LANES;   // keys at once
constexpr int MOST_QUERIES = 48;  // query vectors of one KV head at once: tokens times the heads that share it

// Where a row's K/V lie, and what of them its tokens see.
struct Rows {
    const int32_t *query_indptr, *seq_lens, *block_indptr, *block_ids;
    int64_t block_size, window;

    int64_t length(int64_t row) const { return query_indptr[row + 1] - query_indptr[row]; }

    // The position of the row's first token in this step.
    int64_t start(int64_t row) const { return seq_lens[row] - length(row); }

    // The first position that the token at `at` sees. A window below 0 is the size of chunks, negated.
    int64_t first_seen(int64_t at) const {
        if (window < 0) return at - at % -window;
        return window ? std::max<int64_t>(0, at - window + 1) : 0;
    }

    // Slots of TILE keys of a row from position `first` on. Past those that are filled the last one stands in: it is
    // masked, and what lies in unused slots may be no number.
    void slots(int64_t row, int64_t first, int64_t filled, int64_t* to) const {
        const int32_t* table = block_ids + block_indptr[row] + first / block_size;
        int64_t offset = first % block_size;
        for (int64_t t = 0; t < filled; t++) {
            to[t] = *table * block_size + offset;
            if (++offset == block_size) table++, offset = 0;
        }
        for (int64_t t = filled; t < TILE; t++) to[t] = to[filled - 1];
    }
};

// Tokens [first, last) of rows that stand at [from, to) in the plan's order, and KV heads from `head` on. Of several rows
// each has one token.
struct Part {
    int64_t from, to, first, last, head, heads;
};

// Tokens of a step, rising; without an address all are meant.
struct Wanted {
    const int64_t* tokens;
    int64_t count;

    // Those of them in [first, last).
    std::pair<const int64_t*, const int64_t*> between(int64_t first, int64_t last) const {
        const int64_t* from = std::lower_bound(tokens, tokens + count, first);
        return {from, std::lower_bound(from, tokens + count, last)};
    }
};

struct Plan {
    std::vector<int32_t> order;   // rows
    std::vector<int64_t> common;  // keys that this row of the order and the one after it share, in whole tiles
    std::vector<Part> parts;
};

// Rows of one token, put side by side where their tables begin alike, and what each shares with the one after it. Only
// rows that see their first key: tiles of the others begin elsewhere.
inline void arrange(const Rows& rows, Plan& plan) {
    const auto whole = [&](int32_t row) { return rows.first_seen(rows.seq_lens[row] - 1) == 0; };
    const auto table = [&](int32_t row) { return rows.block_ids + rows.block_indptr[row]; };
    const auto rest = std::stable_partition(plan.order.begin(), plan.order.end(), whole);
    std::stable_sort(plan.order.begin(), rest, [&](int32_t one, int32_t other) {
        return std::lexicographical_compare(table(one), table(one + 1), table(other), table(other + 1));
    });
    plan.common.assign(plan.order.size(), 0);
    for (auto at = plan.order.begin(); rest - at > 1; ++at) {
        const int32_t *one = table(at[0]), *other = table(at[1]);
        const int64_t most = std::min(table(at[0] + 1) - one, table(at[1] + 1) - other);
        const int64_t keys = (std::mismatch(one, one + most, other).first - one) * rows.block_size;
        const int64_t seen = std::min(rows.seq_lens[at[0]], rows.seq_lens[at[1]]);
        plan.common[at - plan.order.begin()] = std::min(keys, seen) / TILE * TILE;
    }
}

// Parts of at most MOST_QUERIES query vectors of a KV head, or of one token if that has more. Those of several tokens come
// first, the last of a row before its others: they take longest.
inline Plan plan_of(const Rows& rows, int64_t num_rows, int64_t kv_heads, int64_t share, int64_t threads, const Wanted& wanted = {}) {
    Plan plan;
    const auto wanted_of = [&](int64_t row) { return wanted.between(rows.query_indptr[row], rows.query_indptr[row + 1]); };
    for (int64_t row = 0; row < num_rows; row++) {
        if (rows.length(row) != 1) continue;
        if (wanted.tokens && wanted_of(row).first == wanted_of(row).second) continue;
        plan.order.push_back(int32_t(row));
    }
    arrange(rows, plan);
    const int64_t single = int64_t(plan.order.size()), most = std::max<int64_t>(1, MOST_QUERIES / share);
    // A token's heads lie side by side and are read together, unless that leaves threads without work.
    const bool few = threads > 1 && num_rows < 2 * threads;
    const auto add = [&](int64_t from, int64_t to, int64_t first, int64_t last) {
        const int64_t queries = (to - from) * (last - first) * share;
        const int64_t fit = few ? 1 : last - first == 1 ? kv_heads : std::max<int64_t>(1, MOST_QUERIES / queries);
        for (int64_t head = 0; head < kv_heads; head += fit) plan.parts.push_back({from, to, first, last, head, std::min(fit, kv_heads - head)});
    };
    for (int64_t row = num_rows - 1; row >= 0; row--) {
        const int64_t length = rows.length(row), from = int64_t(plan.order.size());
        if (length < 2) continue;
        plan.order.push_back(int32_t(row));
        plan.common.push_back(0);
        if (wanted.tokens) {
            const auto [begin, end] = wanted_of(row);
            for (const int64_t* token = begin; token < end; token++)
                add(from, from + 1, *token - rows.query_indptr[row], *token - rows.query_indptr[row] + 1);
            continue;
        }
        for (int64_t first = (length - 1) / most * most; first >= 0; first -= most) add(from, from + 1, first, std::min(length, first + most));
    }
    // Rows that share nothing follow each other in a part, too: the next one's K/V are fetched in time.
    const int64_t chained = std::clamp<int64_t>(single / (4 * threads), 1, most);
    for (int64_t from = 0; from < single;) {
        int64_t to = from + 1;
        const bool shares = plan.common[from] > 0;
        while (to < single && (plan.common[to - 1] > 0 || (!shares && plan.common[to] == 0))) to++;
        const int64_t count = to - from;
        const int64_t pieces = few ? count : shares ? std::max((count + most - 1) / most, std::min(threads, count)) : (count + chained - 1) / chained;
        for (int64_t piece = 0; piece < pieces; piece++) add(from + count * piece / pieces, from + count * (piece + 1) / pieces, 0, 1);
        from = to;
    }
    return plan;
}

// Rows [from, to) of the plan's order look at the tile of keys that begins at `tile`: what one of them sees, all do.
struct Job {
    int64_t from, to, tile;
};

// A part's tiles, in the order of each row's keys. Rows go together as far as all of them share, then those of them that
// share more, and at last each alone.
inline void add_jobs(const Rows& rows, const Plan& plan, const Part& part, int64_t from, int64_t to, int64_t tile, std::vector<Job>& jobs) {
    if (to - from == 1) {
        const int64_t start = rows.start(plan.order[from]);
        for (tile = std::max(tile, rows.first_seen(start + part.first)); tile < start + part.last; tile += TILE) jobs.push_back({from, to, tile});
        return;
    }
    const int64_t end = *std::min_element(plan.common.begin() + from, plan.common.begin() + to - 1);
    for (; tile < end; tile += TILE) jobs.push_back({from, to, tile});
    for (int64_t next = from; next < to; from = next) {
        do next++;
        while (next < to && plan.common[next - 1] > end);
        add_jobs(rows, plan, part, from, next, end, jobs);
    }
}

}  // namespace
