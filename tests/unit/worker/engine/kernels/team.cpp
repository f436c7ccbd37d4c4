// Drives team.h alone: every index of every loop once, loops one after another, sleeping and waking, ends at any moment.
// Usage: team NUM_THREADS NUM_SPINS; exit code 1 and one line on stderr where something is wrong.
#include "team.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

using forebay::Team;

namespace {

void require(bool truth, const char* what) {
  if (truth) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

// Each loop reads what the one before wrote, so a barrier that lets a thread through early is a wrong sum, and a race.
void check_loops(Team& team, int count, int grain) {
  std::vector<int> first(count), second(count), visits(count);
  team.run([&] {
    team.each(count, grain, [&](int i) { first[i] = i + 1; });
    team.each(count, 1, [&](int i) { second[i] = first[i] + first[count - 1 - i]; });
    team.each(0, 1, [&](int) { std::abort(); });
    team.each(count, grain, [&](int i) { ++visits[i]; });
  });
  for (int i = 0; i < count; ++i) {
    require(second[i] == count + 1, "a loop began before the one before it had ended");
    require(visits[i] == 1, "an index was left out, or came twice");
  }
}

}  // namespace

int main(int, char** arguments) {
  const int num_threads = std::atoi(arguments[1]), num_spins = std::atoi(arguments[2]);
  Team team(num_threads, num_spins);
  require(team.size() == num_threads, "another number of threads");
  for (int round = 0; round < 300; ++round) check_loops(team, 1 + round % 97, 1 + round % 7);
  std::atomic<int> bodies{0};
  team.run([&] { ++bodies; });
  require(bodies == num_threads, "a thread didn't run the body");
  for (int i = 0; i < 50; ++i) Team idle(num_threads, num_spins);  // ends before its threads have begun to wait
  for (int i = 0; i < 50; ++i) {
    Team once(num_threads, num_spins);
    once.run([&] { ++bodies; });
  }
  require(bodies == 51 * num_threads, "a thread of a short-lived team didn't run the body");
}
