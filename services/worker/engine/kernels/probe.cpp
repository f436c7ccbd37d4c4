// What this machine can do at most, by the same threads and kernels: a buffer read, a product alone. For bench/engine.py.
#include <chrono>
#include <vector>

#include "errors.h"
#include "matmul.h"
#include "team.h"

namespace forebay {
namespace {

double seconds_of(auto&& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

struct Probe {
  Team team;
  std::vector<uint8_t> values;
  std::vector<float> scales, totals, sums;
};

}  // namespace forebay

extern "C" {

int forebay_probe_open(int num_threads, int num_spins, forebay::Probe** probe) {
  return forebay::guard([&] { *probe = new forebay::Probe{forebay::Team(num_threads, num_spins), {}, {}, {}, {}}; });
}

// Seconds to read a buffer once, `num_bytes` a multiple of 64 KiB.
double forebay_probe_read(forebay::Probe* probe, const uint8_t* buffer, int64_t num_bytes) {
  constexpr int64_t kPage = 1 << 16;
  std::atomic<int> seen{0};
  return forebay::seconds_of([&] {
    probe->team.run([&] {
      forebay::i32x16 sums[4] = {forebay::zero_i32(), forebay::zero_i32(), forebay::zero_i32(), forebay::zero_i32()};
      probe->team.each(static_cast<int>(num_bytes / kPage), 4, [&](int page) {
        const uint8_t* place = buffer + page * kPage;
        for (int64_t i = 0; i < kPage; i += 256)
          for (int k = 0; k < 4; ++k) sums[k] = forebay::add(sums[k], forebay::load_bytes(place + i + k * 64));
      });
      seen += forebay::sum(forebay::add(forebay::add(sums[0], sums[1]), forebay::add(sums[2], sums[3])));  // so that it is read
    });
  });
}

// Seconds of one product of `num_rows` rows of zeros; negative where there is no memory for them.
double forebay_probe_multiply(forebay::Probe* probe, const forebay::Matrix* matrix, int num_rows) {
  forebay::Rows rows;
  rows.num_inputs = matrix->num_inputs;
  rows.format = matrix->format == forebay::kI4 ? forebay::kI8 : static_cast<forebay::Format>(matrix->format);
  const int code = forebay::guard([&] {
    probe->values.resize(std::max(probe->values.size(), num_rows * rows.row_bytes()));
    probe->scales.resize(std::max(probe->scales.size(), size_t(num_rows) * rows.num_groups()));
    probe->totals.resize(probe->scales.size());
    probe->sums.resize(std::max(probe->sums.size(), size_t(num_rows) * matrix->num_outputs));
  });
  if (code != 0) return -1.0;
  rows.values = probe->values.data();
  rows.scales = probe->scales.data();
  rows.totals = probe->totals.data();
  return forebay::seconds_of([&] {
    probe->team.run([&] {
      const int grain = std::max(1, matrix->num_panels() / (probe->team.size() * 16));
      probe->team.each(matrix->num_panels(), grain, [&](int panel) {
        forebay::multiply(*matrix, panel, rows, 0, num_rows, [&](int row, forebay::f32x16 a, forebay::f32x16 b) {
          float* place = probe->sums.data() + size_t(row) * matrix->num_outputs + panel * forebay::kPanel;
          forebay::store(place, a);
          forebay::store(place + forebay::kLanes, b);
        });
      });
    });
  });
}

void forebay_probe_close(forebay::Probe* probe) { delete probe; }
}
