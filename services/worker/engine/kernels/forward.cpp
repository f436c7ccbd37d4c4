// One step of a decoder in one call: embeddings to logits for any mix of prefill, decode and verification. Plain C at its edge.
//
// Rows of the step are tokens. Every value of a row is computed in an order that depends on neither the other rows nor the number of
// threads. Bounds of ids, positions and block tables are the caller's to check (native.py).
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <system_error>
#include <vector>

#include "attention.h"
#include "errors.h"
#include "matmul.h"
#include "team.h"

namespace forebay {

// --- by the wire of ctypes: see library.py

struct Layer {
  const float* attention_norm;
  Matrix qkv;  // outputs: query heads, key heads, value heads, head_dim each, then padding
  const float *query_norm, *key_norm;  // [head_dim], or null
  Matrix out;  // inputs: per head head_dim rounded up to 32
  const float* mlp_norm;
  Matrix gate_up;  // panels of 16 gates and their 16 ups
  Matrix down;
};

struct Model {
  int32_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, sliding_window;  // sliding_window 0: none
  float norm_epsilon;
  int32_t rows_format;  // of activations: fp32, bf16, or int8 for both integer formats
  const Layer* layers;
  const float* norm;
  Matrix embedding, head;
  int32_t vocab_size, unused;
};

struct Step {
  int32_t num_tokens, num_sequences, table_width, num_logit_rows;
  const int32_t *tokens, *positions;
  const float* turns;  // [positions][2][head_dim]: cosine; sine, its first half negative
  const int32_t *query_starts;  // [num_sequences + 1] into the tokens
  const int32_t* tables;        // [num_sequences][table_width]
  const int32_t* logit_rows;    // into the tokens
  float* logits;                // [num_logit_rows][vocab_size]
};

namespace {

constexpr int kQueryRows = 12;  // rows of one attention task

template <class T>
class Buffer {  // aligned, grown and never shrunk; what it held is lost when it grows
 public:
  T* reserve(size_t count) {
    if (count > size_) {
      data_.reset();
      size_ = 0;
      const size_t size = count + count / 2;
      data_.reset(static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 4095) / 4096 * 4096)));
      if (!data_) throw std::bad_alloc();
      size_ = size;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  size_t size_ = 0;
};

class RowsBuffer {
 public:
  Rows reserve(size_t num_rows, int num_inputs, Format format) {
    Rows rows;
    rows.num_inputs = num_inputs;
    rows.format = format;
    rows.values = values_.reserve(num_rows * rows.row_bytes());
    rows.scales = scales_.reserve(num_rows * rows.num_groups());
    rows.totals = totals_.reserve(num_rows * rows.num_groups());
    return rows;
  }

 private:
  Buffer<uint8_t> values_;
  Buffer<float> scales_, totals_;
};

struct Task {  // some query rows of one sequence: (token, head of the group) pairs
  int sequence, first_row, num_rows, context;
};

struct Workspace {
  Buffer<float> stream, qkv, query_scales;
  Buffer<uint8_t> queries;
  RowsBuffer normed, attended, inner, last;
  std::vector<Task> tasks;
};

}  // namespace

class Runner {
 public:
  Runner(const Model& model, const Cache& cache, int num_threads, int num_spins) : model_(model), cache_(cache), team_(num_threads, num_spins) {}

  void forward(const Step& step) {
    step_ = &step;
    const auto format = static_cast<Format>(model_.rows_format);
    const size_t n = step.num_tokens;
    x_ = space_.stream.reserve(n * hidden());
    qkv_ = space_.qkv.reserve(n * model_.layers[0].qkv.num_outputs);
    queries_ = space_.queries.reserve(n * model_.num_heads * cache_.width * 4);
    query_scales_ = space_.query_scales.reserve(n * model_.num_heads);
    normed_ = space_.normed.reserve(n, hidden(), format);
    attended_ = space_.attended.reserve(n, model_.layers[0].out.num_inputs, format);
    inner_ = space_.inner.reserve(n, model_.layers[0].down.num_inputs, format);
    last_ = space_.last.reserve(step.num_logit_rows, hidden(), format);
    plan_tasks();
    team_.run([this] { compute(); });
  }

  // The weights lie elsewhere from now on, and nothing of them is there yet. Not while a step computes.
  void move(const Model& model) {
    model_ = model;
    num_parts_.store(0, std::memory_order_relaxed);
  }

  // Copies them there, part by part: the embedding, each layer, the rest. Steps may compute meanwhile: they wait for the part they need.
  void bring(uint8_t* to, const uint8_t* from, const int64_t* ends, int count) {
    for (int part = 0; part < count; ++part) {
      const int64_t begin = part == 0 ? 0 : ends[part - 1];
      std::memcpy(to + begin, from + begin, ends[part] - begin);
      num_parts_.store(part + 1, std::memory_order_release);
      num_parts_.notify_all();
    }
  }

 private:
  // Until so many parts of the weights are there.
  void await(int32_t count) const {
    for (int32_t there; (there = num_parts_.load(std::memory_order_acquire)) < count;) num_parts_.wait(there, std::memory_order_acquire);
  }

  int hidden() const { return model_.embedding.num_inputs; }
  int group_size() const { return model_.num_heads / model_.num_kv_heads; }

  // Runs on every thread.
  void compute() {
    await(2);
    each_token([&](int t) {
      read_column(model_.embedding, step_->tokens[t], x_ + size_t(t) * hidden());
      normalize(t, model_.layers[0].attention_norm, normed_, t);
    });
    for (int i = 0; i < model_.num_layers; ++i) {
      const Layer& layer = model_.layers[i];
      project(layer.qkv, normed_, [&](int row, int column, f32x16 a, f32x16 b) {
        float* place = qkv_ + size_t(row) * layer.qkv.num_outputs + column;
        store(place, a);
        store(place + kLanes, b);
      });
      dispatch([&](auto form) { rotate_and_store<decltype(form)>(layer, i); });
      dispatch([&](auto form) { attend<decltype(form)>(i); });
      project(layer.out, attended_, [&](int row, int column, f32x16 a, f32x16 b) { add_to_stream(row, column, a, b); });
      each_token([&](int t) { normalize(t, layer.mlp_norm, normed_, t); });
      gate(layer.gate_up);
      project(layer.down, inner_, [&](int row, int column, f32x16 a, f32x16 b) { add_to_stream(row, column, a, b); });
      await(i + 3);
      if (i + 1 < model_.num_layers)
        each_token([&](int t) { normalize(t, model_.layers[i + 1].attention_norm, normed_, t); });
    }
    team_.each(step_->num_logit_rows, 1, [&](int r) { normalize(step_->logit_rows[r], model_.norm, last_, r); });
    if (step_->num_logit_rows > 0) {
      const Matrix& head = model_.head;
      project(head, last_, [&](int row, int column, f32x16 a, f32x16 b) {
        float* place = step_->logits + size_t(row) * model_.vocab_size + column;
        if (column + kPanel <= model_.vocab_size) {
          store(place, a);
          store(place + kLanes, b);
          return;
        }
        float whole[kPanel];
        store(whole, a);
        store(whole + kLanes, b);
        std::copy(whole, whole + model_.vocab_size - column, place);
      });
    }
  }

  template <class F>
  void each_token(F&& f) {
    team_.each(step_->num_tokens, step_->num_tokens > 64 ? 8 : 1, f);
  }

  // done(row, column, 16 sums, 16 sums) for every row and panel.
  template <class Done>
  void project(const Matrix& matrix, const Rows& rows, Done&& done) {
    const int num_rows = &rows == &last_ ? step_->num_logit_rows : step_->num_tokens;
    const int grain = std::max(1, matrix.num_panels() / (team_.size() * 16));
    team_.each(matrix.num_panels(), grain, [&](int panel) {
      multiply(matrix, panel, rows, 0, num_rows, [&](int row, f32x16 a, f32x16 b) { done(row, panel * kPanel, a, b); });
    });
  }

  // silu(gate) * up, two panels of 16 making one group of the down projection.
  void gate(const Matrix& gate_up) {
    constexpr int kRows = 48;
    team_.each(gate_up.num_panels() / 2, 1, [&](int group) {
      alignas(64) float first_half[kRows][kLanes];
      for (int row = 0; row < step_->num_tokens; row += kRows) {
        const int end = std::min(row + kRows, step_->num_tokens);
        multiply(gate_up, 2 * group, normed_, row, end, [&](int r, f32x16 g, f32x16 u) { store(first_half[r - row], mul(silu(g), u)); });
        multiply(gate_up, 2 * group + 1, normed_, row, end,
                 [&](int r, f32x16 g, f32x16 u) { inner_.put(r, group, load(first_half[r - row]), mul(silu(g), u)); });
      }
    });
  }

  void add_to_stream(int row, int column, f32x16 a, f32x16 b) {
    float* place = x_ + size_t(row) * hidden() + column;
    store(place, add(load(place), a));
    store(place + kLanes, add(load(place + kLanes), b));
  }

  // RMSNorm of a row of the stream; padding holds zeros and has zero weights.
  void normalize(int token, const float* weight, const Rows& out, int row) {
    const float* x = x_ + size_t(token) * hidden();
    f32x16 squares = zero();
    for (int i = 0; i < hidden(); i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    const f32x16 inverse = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(model_.hidden_size) + model_.norm_epsilon));
    for (int i = 0; i < hidden(); i += kGroup)
      out.put(row, i / kGroup, mul(mul(load(x + i), inverse), load(weight + i)),
              mul(mul(load(x + i + kLanes), inverse), load(weight + i + kLanes)));
  }

  template <class F>
  void dispatch(F&& f) {
    switch (cache_.format) {
      case kCacheF32: return f(CacheF32{});
      case kCacheBF16: return f(CacheBF16{});
      case kCacheI8: return f(CacheI8{});
      default: return f(CacheE4M3{});
    }
  }

  // Queries to their factors, keys and values to the cache; one task per token and head.
  template <class Form>
  void rotate_and_store(const Layer& layer, int index) {
    const int dim = model_.head_dim, heads = model_.num_heads, kv_heads = model_.num_kv_heads, all = heads + kv_heads;
    team_.each(step_->num_tokens * all, step_->num_tokens > 8 ? all : 2, [&](int task) {
      const int token = task / all, head = task % all;
      const bool is_query = head < heads;
      alignas(64) float turned[kMaxWidth];
      const float* source = qkv_ + size_t(token) * layer.qkv.num_outputs + head * dim;
      turn(source, is_query ? layer.query_norm : layer.key_norm, step_->positions[token], turned);
      if (is_query) {
        const size_t place = size_t(token) * heads + head;
        auto* factors = reinterpret_cast<typename Form::Factor*>(queries_ + place * cache_.width * 4);
        query_scales_[place] = Form::prepare(turned, cache_.width, factors) * kLog2E / std::sqrt(static_cast<float>(dim));
        return;
      }
      const int position = step_->positions[token], slot = position % cache_.block_size, kv_head = head - heads;
      const int block = step_->tables[size_t(sequence_of_[token]) * step_->table_width + position / cache_.block_size];
      store_slot<Form>(cache_, index, block, slot, 0, kv_head, turned);
      std::copy(source + kv_heads * dim, source + kv_heads * dim + dim, turned);
      std::fill(turned + dim, turned + cache_.width, 0.0f);
      store_slot<Form>(cache_, index, block, slot, 1, kv_head, turned);
    });
  }

  // The rotary embedding of one head, [head_dim] to [width] with zeros behind, normalised before where the model does that.
  void turn(const float* source, const float* norm, int position, float* out) const {
    const int dim = model_.head_dim;
    const float* turns = step_->turns + size_t(position) * 2 * dim;
    if (norm == nullptr) {
      rotate(source, turns, dim / 2, out);
    } else {
      float squares = 0, normed[kMaxWidth];
      for (int i = 0; i < dim; ++i) squares += source[i] * source[i];
      const float factor = 1.0f / std::sqrt(squares / static_cast<float>(dim) + model_.norm_epsilon);
      for (int i = 0; i < dim; ++i) normed[i] = source[i] * factor * norm[i];
      rotate(normed, turns, dim / 2, out);
    }
    std::fill(out + dim, out + cache_.width, 0.0f);
  }

  static void rotate(const float* __restrict x, const float* __restrict turns, int half, float* __restrict out) {
    const float *cosine = turns, *sine = turns + 2 * half;
    for (int i = 0; i < half; ++i) out[i] = x[i] * cosine[i] + x[i + half] * sine[i];
    for (int i = half; i < 2 * half; ++i) out[i] = x[i] * cosine[i] + x[i - half] * sine[i];
  }

  // Cuts the step's query rows into tasks, the longest contexts first.
  void plan_tasks() {
    sequence_of_.resize(step_->num_tokens);
    space_.tasks.clear();
    for (int s = 0; s < step_->num_sequences; ++s) {
      const int start = step_->query_starts[s], end = step_->query_starts[s + 1];
      std::fill(sequence_of_.begin() + start, sequence_of_.begin() + end, s);
      const int first = start * group_size(), last = end * group_size();
      for (int row = first; row < last; row += kQueryRows) {
        const int count = std::min(kQueryRows, last - row);
        space_.tasks.push_back({s, row, count, step_->positions[(row + count - 1) / group_size()]});
      }
    }
    std::stable_sort(space_.tasks.begin(), space_.tasks.end(), [](const Task& a, const Task& b) { return a.context > b.context; });
  }

  template <class Form>
  void attend(int layer) {
    const int kv_heads = model_.num_kv_heads;
    team_.each(static_cast<int>(space_.tasks.size()) * kv_heads, 1, [&](int i) {
      with_size<Form, 0>(space_.tasks[i / kv_heads], layer, i % kv_heads);
    });
  }

  // The smallest of the compiled sizes that holds the task's rows.
  template <class Form, int I>
  void with_size(const Task& task, int layer, int kv_head) {
    constexpr int kSizes[] = {1, 2, 3, 4, 6, 9, kQueryRows};
    if (task.num_rows <= kSizes[I]) return attend_task<Form, kSizes[I]>(task, layer, kv_head);
    if constexpr (I < 6) with_size<Form, I + 1>(task, layer, kv_head);
  }

  template <class Form, int R>
  void attend_task(const Task& task, int layer, int kv_head) {
    QueryRow<Form> rows[R];
    alignas(64) float results[R][kMaxWidth];
    float* out[R];
    for (int r = 0; r < R; ++r) {
      const int row = task.first_row + std::min(r, task.num_rows - 1);  // the last one again, where there are fewer
      const int token = row / group_size(), head = kv_head * group_size() + row % group_size();
      const size_t place = size_t(token) * model_.num_heads + head;
      const int position = step_->positions[token];
      const int first = model_.sliding_window > 0 ? std::max(0, position - model_.sliding_window + 1) : 0;
      const auto* factors = reinterpret_cast<const typename Form::Factor*>(queries_ + place * cache_.width * 4);
      rows[r] = {factors, query_scales_[place], first, position};
      out[r] = results[r];
    }
    Attention<Form>(cache_, layer, kv_head, step_->tables + size_t(task.sequence) * step_->table_width).template attend<R>(rows, out);
    for (int r = 0; r < task.num_rows; ++r) put_head(task.first_row + r, kv_head, results[r]);
  }

  // One head's result into the rows of the output projection.
  void put_head(int row, int kv_head, const float* result) {
    const int token = row / group_size(), head = kv_head * group_size() + row % group_size();
    const int padded = (model_.head_dim + kGroup - 1) / kGroup;  // groups of a head
    for (int g = 0; g < padded; ++g) {
      const bool second = g * kGroup + kLanes < cache_.width;
      attended_.put(token, head * padded + g, load(result + g * kGroup), second ? load(result + g * kGroup + kLanes) : zero());
    }
  }

  Model model_;
  const Cache cache_;
  Team team_;
  Workspace space_;
  std::vector<int> sequence_of_;
  const Step* step_ = nullptr;
  float *x_ = nullptr, *qkv_ = nullptr, *query_scales_ = nullptr;
  uint8_t* queries_ = nullptr;
  Rows normed_, attended_, inner_, last_;
  alignas(64) std::atomic<int32_t> num_parts_{std::numeric_limits<int32_t>::max()};  // of the weights, that are there
};

}  // namespace forebay

extern "C" {

// Threads and workspace of one model and cache, which must outlive it.
int forebay_open(const forebay::Model* model, const forebay::Cache* cache, int num_threads, int num_spins, forebay::Runner** runner) {
  return forebay::guard([&] { *runner = new forebay::Runner(*model, *cache, num_threads, num_spins); });
}

// Memory for the step is had before anything is computed: an error leaves the cache as it was.
int forebay_forward(forebay::Runner* runner, const forebay::Step* step) {
  return forebay::guard([&] { runner->forward(*step); });
}

// See Runner: where the weights will be, none of which may be moved again before forebay_bring has returned.
void forebay_move(forebay::Runner* runner, const forebay::Model* model) { runner->move(*model); }

void forebay_bring(forebay::Runner* runner, uint8_t* to, const uint8_t* from, const int64_t* ends, int count) {
  runner->bring(to, from, ends, count);
}

void forebay_close(forebay::Runner* runner) { delete runner; }
}
