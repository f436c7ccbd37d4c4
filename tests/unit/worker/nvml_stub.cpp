// A driver's library with one GPU, "GPU-1": every reading answers, or fails with the code that a test has set for all of them.
#include <cstring>

namespace {
int code = 0;
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
  *device = &code;
  return std::strcmp(uuid, "GPU-1") == 0 ? 0 : 6;  // NVML_ERROR_NOT_FOUND
}
int nvmlDeviceGetUtilizationRates(void*, Utilization* out) {
  if (code == 0) *out = {97, 55};
  return code;
}
int nvmlDeviceGetTemperature(void*, int, unsigned* out) { return answer(out, 61); }
int nvmlDeviceGetPowerUsage(void*, unsigned* out) { return answer(out, 412500); }
int nvmlDeviceGetClockInfo(void*, int type, unsigned* out) { return answer(out, type == 1 ? 1980 : 3201); }
}
