// The layers of a decoder one after the other, in threads that do not sleep in between. Memory that is not to be had
// here ends the process: there are a few KB for each thread.
//
// Station: called by kernels.cpp; the order of things is `FusedLayer`'s, which is its oracle.

#pragma once

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "attention.h"
#include "gated.h"
#include "layer_ops.h"
#include "linear.h"

namespace {

#ifdef KVPLANE_LINEAR
// Threads that go through the same stages together. Waiting for a sleeping thread takes as long as a stage of a small
// step, so they look for each other some microseconds long before they let others run.
class Team {
   public:
    explicit Team(int size) : size_(size), taken_(size) {}

    // Each item of [0, count) is worked on by one thread; then all go on. A thread begins with a stretch of its own, for
    // memory is read fastest in order, and then helps the others with theirs.
    template <typename Work>
    void share(int64_t count, int64_t portion, const Work& work) {
        for (int ahead = 0, me = omp_get_thread_num(); ahead < size_; ahead++) {
            const int64_t owner = (me + ahead) % size_, end = count * (owner + 1) / size_;
            for (;;) {
                const int64_t first = count * owner / size_ + taken_[owner].items.fetch_add(portion, std::memory_order_relaxed);
                if (first >= end) break;
                for (int64_t item = first; item < std::min(end, first + portion); item++) work(item);
            }
        }
        wait();
    }

   private:
    static constexpr int LOOKS = 200;  // some microseconds

    struct alignas(64) Taken {
        std::atomic<int64_t> items{0};
    };

    void wait() {
        const int64_t stage = stage_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            for (Taken& taken : taken_) taken.items.store(0, std::memory_order_relaxed);
            stage_.store(stage + 1, std::memory_order_release);
            return;
        }
        for (int looks = 0; stage_.load(std::memory_order_acquire) == stage; looks++) {
            if (looks < LOOKS)
                _mm_pause();
            else
                sched_yield();
        }
    }

    const int size_;
    std::vector<Taken> taken_;
    alignas(64) std::atomic<int64_t> stage_{0};
    alignas(64) std::atomic<int> arrived_{0};
};

// What all layers have in common, in elements; `inner` is the width between the MLP's products.
struct Sizes {
    int64_t width, heads, kv_heads, dim, inner;

    int64_t qkv() const { return (heads + 2 * kv_heads) * dim; }
    int64_t workspace() const { return 2 * width + qkv() + heads * dim + (can_gate(inner) ? 1 : 3) * inner; }
};

// One layer's weights; those of products are packed. Biases and the norms of heads may be absent.
struct Layer {
    const bfloat16 *input_norm, *qkv, *qkv_bias, *query_norm, *key_norm, *output, *output_bias, *middle_norm, *gate_up, *gate_up_bias,
        *down, *down_bias;
    double input_eps, query_eps, key_eps, middle_eps, scaling;
};

// Where a layer's K/V lie, and whose tables name them.
struct Page {
    bfloat16 *keys, *values;
    int64_t group;
};

// The rows of a step in one KV group, and where its tokens go.
struct Group {
    const int32_t *query_indptr, *seq_lens, *block_indptr, *block_ids;
    const int64_t* slots;
    int64_t block_size, window, num_rows;
};

inline void head_norms(bfloat16* heads_of, const bfloat16* weight, float eps, int64_t heads, int64_t dim) {
    for (int64_t head = 0; head < heads; head++) rms_norm_row(heads_of + head * dim, (bfloat16*)nullptr, weight, eps, dim, heads_of + head * dim);
}

inline void run_layers(const Sizes& sizes, const Layer* layers, int64_t num_layers, const Page* pages, const Group* groups,
                       int64_t num_groups, const bfloat16* cos, const bfloat16* sin, int64_t tokens, const Wanted& wanted,
                       bfloat16* states, bfloat16* workspace, int threads) {
    const int64_t width = sizes.width, dim = sizes.dim, heads = sizes.heads, kv_heads = sizes.kv_heads, inner = sizes.inner;
    const int64_t qkv_width = sizes.qkv(), kv_width = kv_heads * dim, share = heads / kv_heads;
    bfloat16* normed = workspace;
    bfloat16* added = normed + tokens * width;
    bfloat16* qkv = added + tokens * width;
    bfloat16* attended = qkv + tokens * qkv_width;
    bfloat16* active = attended + tokens * heads * dim;
    bfloat16* both = active + tokens * inner;
    std::vector<Rows> rows;
    std::vector<Plan> plans;
    for (int64_t group = 0; group < num_groups; group++) {
        const Group& of = groups[group];
        rows.push_back({of.query_indptr, of.seq_lens, of.block_indptr, of.block_ids, of.block_size, of.window});
        plans.push_back(plan_of(rows.back(), of.num_rows, kv_heads, share, threads));
    }
    // After the last layer's K/V only the tokens that are wanted count. With a window tiles begin where a part's first token
    // sees its first key, so that a token alone would get other last bits.
    const bool some = wanted.tokens && tokens > FEW_ROWS && !rows[pages[num_layers - 1].group].window;
    const int64_t at_last = some ? wanted.count : tokens;
    Plan last_plan;
    if (some) last_plan = plan_of(rows[pages[num_layers - 1].group], groups[pages[num_layers - 1].group].num_rows, kv_heads, share, threads, wanted);
    const auto token_of = [&](int64_t place, bool last) { return last && some ? wanted.tokens[place] : place; };
    Team* team = nullptr;
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
        team = new Team(omp_get_num_threads());
        thread_local Workspace own;
        const auto linear = [&](const bfloat16* x, int64_t count, const bfloat16* packed, const bfloat16* bias, int64_t inputs, int64_t outputs,
                                bfloat16* y) {
            team->share(linear_blocks(outputs), 1, [&](int64_t block) {
                linear_block(x, packed, bias, count, tokens > FEW_ROWS, outputs, inputs, y, block);
            });
        };
        const auto gate = [&](const Layer& layer, int64_t count) {
            if (can_gate(inner)) {
                team->share(inner / COLUMNS, 1, [&](int64_t block) {
                    gated_block(normed, layer.gate_up, layer.gate_up_bias, count, tokens > FEW_ROWS, inner, width, active, block);
                });
                return;
            }
            linear(normed, count, layer.gate_up, layer.gate_up_bias, width, 2 * inner, both);
            const int64_t chunk = 512, chunks = (inner + chunk - 1) / chunk;
            team->share(count * chunks, 4, [&](int64_t item) {
                const int64_t token = item / chunks, start = item % chunks * chunk;
                const bfloat16* gates = both + token * 2 * inner + start;
                silu_and_mul_part(gates, gates + inner, std::min(chunk, inner - start), active + token * inner + start);
            });
        };
        for (int64_t number = 0; number < num_layers; number++) {
            const Layer& layer = layers[number];
            const Page& page = pages[number];
            const Group& group = groups[page.group];
            team->share(tokens, 4, [&](int64_t token) {
                rms_norm_row(states + token * width, number ? added + token * width : nullptr, layer.input_norm, float(layer.input_eps), width,
                             normed + token * width);
            });
            linear(normed, tokens, layer.qkv, layer.qkv_bias, width, qkv_width, qkv);
            team->share(tokens, 4, [&](int64_t token) {
                bfloat16 *query = qkv + token * qkv_width, *key = query + heads * dim, *value = key + kv_width;
                if (layer.query_norm) {
                    head_norms(query, layer.query_norm, float(layer.query_eps), heads, dim);
                    head_norms(key, layer.key_norm, float(layer.key_eps), kv_heads, dim);
                }
                rotary_row(query, cos + token * dim, sin + token * dim, heads + kv_heads, dim);
                std::memcpy(page.keys + group.slots[token] * kv_width, key, kv_width * sizeof *key);
                std::memcpy(page.values + group.slots[token] * kv_width, value, kv_width * sizeof *value);
            });
            const Attention<bfloat16> attention = {qkv,  qkv_width, page.keys, page.values, rows[page.group], kv_heads, share, int(dim),
                                                   float(layer.scaling), attended};
            const bool last = number == num_layers - 1;
            const Plan& plan = last && some ? last_plan : plans[page.group];
            team->share(int64_t(plan.parts.size()), 1, [&](int64_t part) { attend_part_of(attention, plan, plan.parts[part], own); });
            const int64_t count = last ? at_last : tokens;
            const bfloat16* mixed = attended;
            if (last && some) {  // side by side, where queries were
                team->share(count, 4, [&](int64_t place) {
                    std::memcpy(qkv + place * heads * dim, attended + token_of(place, last) * heads * dim, heads * dim * sizeof *qkv);
                });
                mixed = qkv;
            }
            linear(mixed, count, layer.output, layer.output_bias, heads * dim, width, added);
            team->share(count, 4, [&](int64_t place) {
                rms_norm_row(states + token_of(place, last) * width, added + place * width, layer.middle_norm, float(layer.middle_eps), width,
                             normed + place * width);
            });
            gate(layer, count);
            linear(active, count, layer.down, layer.down_bias, inner, width, added);
        }
        team->share(at_last, 4, [&](int64_t place) {
            for (int64_t i = 0; i < width; i += LANES) {
                const int count = int(std::min<int64_t>(LANES, width - i));
                bfloat16* to = states + token_of(place, true) * width + i;
                store_part(to, load_part(to, count) + load_part(added + place * width + i, count), count);
            }
        });
    }
    delete team;
}
#endif

}  // namespace
