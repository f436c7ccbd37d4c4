// A driver's library with one GPU, "GPU-1", and a part of it, "MIG-2": every reading answers, or fails with the code that a test has set for all of them.
#include <cstring>

namespace {
int code = 0, part = 0;
struct Utilization {
  unsigned gpu, memory;
};
int answer(unsigned* out, unsigned value) {
  if (code == 0) *out = value;
  return code;
}
}  // namespace

extern "C" {
void fail_with(int with) { code = with; }
int nvmlInitWithFlags(unsigned) { return 0; }
int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  const bool is_part = std::strcmp(uuid, "MIG-2") == 0;
  *device = is_part ? static_cast<void*>(&part) : &code;
  return is_part || std::strcmp(uuid, "GPU-1") == 0 ? 0 : 6;  // NVML_ERROR_NOT_FOUND
}
int nvmlDeviceIsMigDeviceHandle(void* device, unsigned* out) { return answer(out, device == &part); }
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void*, void** device) {
  *device = &code;
  return code;
}
int nvmlDeviceGetUtilizationRates(void* device, Utilization* out) {
  if (device == &part) return 3;  // NVML_ERROR_NOT_SUPPORTED
  if (code == 0) *out = {97, 55};
  return code;
}
int nvmlDeviceGetTemperatureThreshold(void* device, int type, unsigned* out) {
  return device == &part ? 3 : answer(out, type == 1 ? 87 : 92);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* out) {
  if (code == 0) *out = 0x24;
  return code;
}
int nvmlDeviceGetCurrPcieLinkGeneration(void*, unsigned* out) { return answer(out, 5); }
int nvmlDeviceGetCurrPcieLinkWidth(void*, unsigned* out) { return answer(out, 16); }
int nvmlDeviceGetPcieReplayCounter(void*, unsigned* out) { return answer(out, 7); }
int nvmlDeviceGetNvLinkState(void*, unsigned link, unsigned* out) { return link < 4 ? answer(out, link != 2) : 2; }
int nvmlDeviceGetMigMode(void*, unsigned* now, unsigned* later) { return answer(now, 1) | answer(later, 0); }
int nvmlDeviceGetMemoryBusWidth(void*, unsigned* out) { return answer(out, 5120); }
int nvmlDeviceGetMaxClockInfo(void*, int, unsigned* out) { return answer(out, 2619); }
int nvmlDeviceGetTemperature(void*, int, unsigned* out) { return answer(out, 61); }
int nvmlDeviceGetPowerUsage(void*, unsigned* out) { return answer(out, 412500); }
int nvmlDeviceGetClockInfo(void*, int type, unsigned* out) { return answer(out, type == 1 ? 1980 : 3201); }
}
