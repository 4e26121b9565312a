// A libnvrtc of version MAJOR.MINOR for the architectures of ARCHITECTURES: what nvrtc.h says of a compiler.
#include <string.h>

static const int numbers[] = {ARCHITECTURES};

int nvrtcVersion(int* major, int* minor) { return *major = MAJOR, *minor = MINOR, 0; }
int nvrtcGetNumSupportedArchs(int* count) { return *count = sizeof(numbers) / sizeof(int), 0; }
int nvrtcGetSupportedArchs(int* out) { return memcpy(out, numbers, sizeof(numbers)), 0; }
