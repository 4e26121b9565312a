// A libcuda.so.1 that runs kernels: memory is the process' own, and an image names a library of the CUDA emulator.
//
// An image is "arch NVRTC-major\npath". FAKE_GPU: "arch multiprocessors shared driver devices"; FAKE_FAULT: one of below.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NO_DEVICE = 100, INVALID_IMAGE = 200, NO_BINARY = 209, NOT_FOUND = 500,
       NOT_READY = 600, ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719, TOO_LARGE = 720 };
enum { MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76, SHARED_OPTIN = 97 };

typedef int Emulate(const void* argument, int grids, int blocks, int threads, int shared, uint64_t seed, int flags,
                    char* error, int error_size);
typedef struct {
  void* library;
} Module;

static int architecture, multiprocessors, shared_optin, driver, devices;

static void read_card(void) {
  sscanf(getenv("FAKE_GPU"), "%d %d %d %d %d", &architecture, &multiprocessors, &shared_optin, &driver, &devices);
}
static int fault(const char* name) {
  const char* given = getenv("FAKE_FAULT");
  return given && !strcmp(given, name);
}

int cuInit(unsigned flags) { return read_card(), devices ? SUCCESS : NO_DEVICE; }
int cuDriverGetVersion(int* version) { return read_card(), *version = driver, SUCCESS; }
int cuDeviceGetCount(int* count) { return *count = devices, SUCCESS; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, SUCCESS; }
int cuDeviceGetName(char* name, int size, int device) { return snprintf(name, size, "Fake GPU"), SUCCESS; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { return *bytes = 1ull << 34, SUCCESS; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == MULTIPROCESSORS ? multiprocessors : attribute == MAJOR ? architecture / 10
           : attribute == MINOR ? architecture % 10 : attribute == SHARED_OPTIN ? shared_optin : 0;
  return SUCCESS;
}
int cuGetErrorName(int status, const char** name) { return *name = "FAKE_ERROR", SUCCESS; }
int cuGetErrorString(int status, const char** text) { return *text = "of the tests", SUCCESS; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = &devices, SUCCESS; }
int cuCtxSetCurrent(void* context) { return context == &devices ? SUCCESS : INVALID_VALUE; }
int cuStreamCreate(void** stream, unsigned flags) { return *stream = &driver, SUCCESS; }
int cuEventCreate(void** event, unsigned flags) { return *event = &driver, SUCCESS; }
int cuEventRecord(void* event, void* stream) { return SUCCESS; }
int cuEventElapsedTime(float* ms, void* start, void* end) { return *ms = 1, SUCCESS; }

int cuMemAlloc_v2(uint64_t* at, size_t bytes) {
  *at = (uint64_t)aligned_alloc(256, (bytes + 255) / 256 * 256);
  return memset((void*)*at, 0x5a, bytes), SUCCESS;
}
int cuMemsetD8_v2(uint64_t at, unsigned char value, size_t count) { return memset((void*)at, value, count), SUCCESS; }
int cuMemcpyHtoD_v2(uint64_t at, const void* from, size_t count) {
  memcpy((void*)at, from, count);
  if (fault("wrong numbers") && count == 33 * 32) memset((void*)at, 0, count / 2);  // of the cosines and sines
  return SUCCESS;
}
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t count) { return memcpy(to, (void*)from, count), SUCCESS; }
int cuMemHostAlloc(void** at, size_t bytes, unsigned flags) {
  *at = aligned_alloc(256, (bytes + 255) / 256 * 256);
  return flags == 3 ? SUCCESS : INVALID_VALUE;
}

int cuModuleLoadData(Module** module, const char* image) {
  int of_architecture, major, used;
  if (sscanf(image, "%d %d\n%n", &of_architecture, &major, &used) != 2 || major > driver / 1000) return INVALID_IMAGE;
  if (of_architecture != architecture) return NO_BINARY;
  *module = calloc(1, sizeof(Module));
  (*module)->library = dlopen(image + used, RTLD_NOW);
  return (*module)->library ? SUCCESS : (fprintf(stderr, "%s\n", dlerror()), INVALID_IMAGE);
}
int cuModuleGetFunction(Emulate** function, Module* module, const char* name) {
  char symbol[64];
  snprintf(symbol, sizeof symbol, "emulate_%s", name);
  return (*function = (Emulate*)dlsym(module->library, symbol)) ? SUCCESS : NOT_FOUND;
}
int cuFuncSetAttribute(Emulate* function, int attribute, int value) {
  return attribute == 8 && value > shared_optin ? INVALID_VALUE : SUCCESS;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Emulate* function, int threads, size_t shared) {
  return *blocks = fault("others are there") ? 0 : 1, SUCCESS;
}
int cuLaunchCooperativeKernel(Emulate* function, unsigned blocks, unsigned y, unsigned z, unsigned threads, unsigned by,
                              unsigned bz, unsigned shared, void* stream, void** arguments) {
  static int launches;
  char error[4096];
  if (stream != &driver || y * z * by * bz != 1) return INVALID_VALUE;
  if (blocks > (unsigned)multiprocessors) return TOO_LARGE;
  const int missing = launches++ > 2 && fault("a block is missing");  // of the kernel of passes, after three others
  if (!function(arguments[0], 1, blocks - missing, threads, shared, launches, missing, error, sizeof error)) return SUCCESS;
  fprintf(stderr, "%s\n", error);
  return LAUNCH_FAILED;
}
int cuStreamQuery(void* stream) {
  if (fault("the process crashes")) abort();
  if (fault("the driver is stuck")) sleep(600);
  return fault("a launch never ends") ? NOT_READY : fault("an illegal address") ? ILLEGAL_ADDRESS : SUCCESS;
}
