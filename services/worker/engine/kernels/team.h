// The threads of a step: they run one body together, share out its loops and wait for each other.
//
// A thread that waits spins for a moment, as the others are mostly microseconds behind, and then sleeps: where a core is shared with
// another process, a spinning thread would keep the one it waits for from running.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace forebay {

class Team {
 public:
  Team(int num_threads, int num_spins) : num_threads_(num_threads), num_spins_(num_spins), stretches_(num_threads) {
    try {
      for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { serve(i); });
    } catch (...) {  // the machine gives no more threads: those that run must end before they are destroyed
      stop();
      throw;
    }
  }

  ~Team() { stop(); }

  int size() const { return num_threads_; }

  // Runs body() on every thread, the caller's among them; returns when all are through.
  template <class Body>
  void run(Body&& body) {
    body_ = [](void* what) { (*static_cast<Body*>(what))(); };
    what_ = &body;
    start();
    call();
    barrier();
  }

  // Inside a body: f(i) for i from 0 to count - 1; then a barrier. A thread has a stretch of its own, as memory is read fastest in one
  // piece, and takes `grain` at a time from it; one that is through takes from the others' stretches.
  template <class F>
  void each(int count, int grain, F&& f) {
    const int length = (count + num_threads_ - 1) / num_threads_;
    for (int i = 0; i < num_threads_; ++i) {
      const int owner = (index_ + i) % num_threads_, begin = owner * length, end = std::min(begin + length, count);
      take(stretches_[owner].taken, begin, end, grain, f);
    }
    barrier();
  }

 private:
  struct alignas(64) Stretch {
    std::atomic<int> taken{0};
  };

  template <class F>
  static void take(std::atomic<int>& taken, int begin, int end, int grain, F&& f) {
    while (begin + taken.load(std::memory_order_relaxed) < end) {
      const int first = begin + taken.fetch_add(grain, std::memory_order_relaxed);
      for (int i = first; i < std::min(first + grain, end); ++i) f(i);
    }
  }

  void stop() {
    stopping_ = true;
    start();
    for (auto& thread : threads_) thread.join();
  }

  void serve(int index) {
    index_ = index;
    for (uint32_t round = 0;; ++round) {
      wait(rounds_, round);
      if (stopping_) return;
      call();
      barrier();
    }
  }

  void start() {
    rounds_.fetch_add(1, std::memory_order_release);
    rounds_.notify_all();
  }

  void call() {
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(saved | 0x8040);  // denormals are zero: they would cost a hundred cycles each
    body_(what_);
    _mm_setcsr(saved);
  }

  void barrier() {
    const uint32_t phase = phases_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < num_threads_) return wait(phases_, phase);
    arrived_.store(0, std::memory_order_relaxed);
    for (auto& stretch : stretches_) stretch.taken.store(0, std::memory_order_relaxed);
    phases_.fetch_add(1, std::memory_order_release);
    phases_.notify_all();
  }

  void wait(std::atomic<uint32_t>& counter, uint32_t old) const {
    for (int i = 0; i < num_spins_; ++i) {
      if (counter.load(std::memory_order_acquire) != old) return;
      _mm_pause();
    }
    while (counter.load(std::memory_order_acquire) == old) counter.wait(old, std::memory_order_acquire);
  }

  inline static thread_local int index_ = 0;  // of this thread in its team; who calls `run` is the first
  const int num_threads_, num_spins_;
  std::vector<Stretch> stretches_;
  std::vector<std::thread> threads_;
  void (*body_)(void*) = nullptr;
  void* what_ = nullptr;
  bool stopping_ = false;
  alignas(64) std::atomic<uint32_t> rounds_{0};
  alignas(64) std::atomic<uint32_t> phases_{0};
  alignas(64) std::atomic<int> arrived_{0};
};

}  // namespace forebay
