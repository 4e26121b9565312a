// A libcuda.so.1 without a GPU: it refuses what a driver would refuse of one card, and writes down every launch.
//
// Structures and numbers are those of NVIDIA's cuda.h, written once more here, so that what cuda-bindings hands over is
// read by someone else. An image is text: "arch NVRTC-major\n", then "name registers argument-bytes\n" for each kernel.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_IMAGE = 200, NO_BINARY = 209, NOT_FOUND = 500, OUT_OF_RESOURCES = 701,
       TOO_LARGE = 720 };
enum { NUM_REGS = 4, MAX_DYNAMIC_SHARED = 8, CARVEOUT = 9, COOPERATIVE = 2, TIME_LIMIT = 17 };

typedef struct {
  int driver, architecture, multiprocessors, threads, registers, shared_total, shared_block;
  int max_blocks;  // of a cooperative launch, where others use the GPU as well; what the occupancy does not know
} Card;
typedef struct {
  char name[32];
  int registers, argument_bytes, max_shared, carveout, loaded;
} Kernel;
typedef struct {
  unsigned id;
  char pad[4];
  union { char bytes[64]; int value; } value;
} Attribute;
typedef struct {
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned attribute_count;
} Config;

static Card card;
static char text[1 << 22];
static size_t written;

void fake_card(const int* fields) { memcpy(&card, fields, sizeof(card)); }
const char* fake_log(void) {
  if (!written) text[0] = 0;
  written = 0;
  return text;
}
// faults: the status of a launch, and of a stream, from the `after`-th launch on (negative: until so many); a display
static int faults[4], launches;
void fake_fail(const int* fields) { memcpy(faults, fields, sizeof(faults)), launches = 0; }
static int in_force(int status) { return status && (faults[2] < 0 ? launches <= -faults[2] : launches >= faults[2]) ? status : SUCCESS; }
int fake_query(void) { return in_force(faults[1]); }
#define LOG(...) (written += snprintf(text + written, sizeof(text) - written, __VA_ARGS__))

int cuDriverGetVersion(int* version) {
  *version = card.driver;
  return SUCCESS;
}

int cuGetErrorString(int code, const char** out) {
  static char message[32];
  snprintf(message, sizeof(message), "fake error %d", code);
  *out = message;
  return SUCCESS;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  return attribute == TIME_LIMIT ? (*value = faults[3], SUCCESS) : INVALID_VALUE;
}

int cuLibraryLoadData(void** library, const char* image) {
  int architecture, nvrtc, used, count = 0;
  char name[32];
  int registers, bytes;
  if (sscanf(image, "%d %d\n%n", &architecture, &nvrtc, &used) != 2) return INVALID_IMAGE;
  if (nvrtc > card.driver / 1000) return INVALID_IMAGE;  // machine code of a newer toolkit's format
  if (architecture != card.architecture) return NO_BINARY;
  Kernel* kernels = calloc(16, sizeof(Kernel));
  for (image += used; sscanf(image, "%31s %d %d\n%n", name, &registers, &bytes, &used) == 3; image += used, ++count) {
    strcpy(kernels[count].name, name);
    kernels[count].registers = registers, kernels[count].argument_bytes = bytes;
    kernels[count].max_shared = 48 * 1024;
  }
  *library = kernels;
  return SUCCESS;
}

int cuLibraryGetKernel(Kernel** kernel, Kernel* library, const char* name) {
  for (int i = 0; i < 16; ++i)
    if (!strcmp(library[i].name, name)) return *kernel = library + i, SUCCESS;
  return NOT_FOUND;
}

int cuKernelSetAttribute(int attribute, int value, Kernel* kernel, int device) {
  (void)device;
  if (attribute == MAX_DYNAMIC_SHARED && value > card.shared_block) return INVALID_VALUE;
  if (attribute == MAX_DYNAMIC_SHARED) kernel->max_shared = value;
  if (attribute == CARVEOUT) kernel->carveout = value;
  return SUCCESS;
}

int cuKernelGetFunction(Kernel** function, Kernel* kernel) { return *function = kernel, SUCCESS; }

int cuFuncGetAttribute(int* value, int attribute, Kernel* kernel) {
  kernel->loaded = 1;
  *value = attribute == NUM_REGS ? kernel->registers : 0;
  return SUCCESS;
}

static int least(int a, int b) { return a < b ? a : b; }

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel* kernel, int threads, size_t shared) {
  const int warp_registers = (kernel->registers * 32 + 255) / 256 * 256;
  const int of_shared = card.shared_total / (((int)shared + 1024 + 127) / 128 * 128);
  *blocks = least(of_shared, least(card.threads / threads, card.registers / warp_registers / ((threads + 31) / 32)));
  return SUCCESS;
}

int cuLaunchKernelEx(const Config* config, Kernel* kernel, void** arguments, void** extra) {
  const int threads = config->block[0], blocks = config->grid[0];
  int resident, cooperative = 0;
  ++launches;
  if (in_force(faults[0])) return faults[0];
  if (extra || threads > 1024 || (int)config->shared > kernel->max_shared) return INVALID_VALUE;
  if (threads * kernel->registers > card.registers) return OUT_OF_RESOURCES;
  cuOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, config->shared);
  for (unsigned i = 0; i < config->attribute_count; ++i)
    if (config->attributes[i].id == COOPERATIVE) cooperative = config->attributes[i].value.value;
  if (cooperative && blocks > least(card.max_blocks, resident * card.multiprocessors)) return TOO_LARGE;
  LOG("{\"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %u, \"max_shared\": %d, ",
      kernel->name, config->grid[0], config->grid[1], config->grid[2], config->block[0], config->block[1],
      config->block[2], config->shared, kernel->max_shared);
  LOG("\"stream\": %llu, \"loaded\": %d, \"carveout\": %d, \"resident\": %d, \"attributes\": [",
      (unsigned long long)(uintptr_t)config->stream, kernel->loaded, kernel->carveout, resident);
  for (unsigned i = 0; i < config->attribute_count; ++i)
    LOG("%s[%u, %d]", i ? ", " : "", config->attributes[i].id, config->attributes[i].value.value);
  LOG("], \"argument\": \"");
  for (int i = 0; i < kernel->argument_bytes; ++i) LOG("%02x", ((unsigned char*)arguments[0])[i]);
  LOG("\"}\n");
  return SUCCESS;
}

// cuda-bindings asks for everything that a driver can; what is not there is an error when it is called
int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* status) {
  (void)version, (void)flags;
  static void* self;
  Dl_info here;
  if (!self && dladdr((void*)fake_card, &here)) self = dlopen(here.dli_fname, RTLD_LAZY);
  *function = strcmp(name, "cuGetProcAddress") ? dlsym(self, name) : (void*)cuGetProcAddress_v2;
  if (status) *status = *function == NULL;
  return *function ? SUCCESS : NOT_FOUND;
}
