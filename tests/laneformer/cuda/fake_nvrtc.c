// A libnvrtc of version MAJOR.MINOR for the architectures of ARCHITECTURES, which copies its input: nvrtc.h's calls.
#include <stdio.h>
#include <string.h>

static char text[4096];
static const int numbers[] = {ARCHITECTURES};

int nvrtcVersion(int* major, int* minor) { return *major = MAJOR, *minor = MINOR, 0; }
int nvrtcGetNumSupportedArchs(int* count) { return *count = sizeof(numbers) / sizeof(int), 0; }
int nvrtcGetSupportedArchs(int* out) { return memcpy(out, numbers, sizeof(numbers)), 0; }
int nvrtcCreateProgram(void** program, const char* source, const char* name, int count, void* headers, void* names) {
  snprintf(text, sizeof(text), "%s %s %d", source, name, count + !!headers + !!names);
  return *program = text, 0;
}
int nvrtcCompileProgram(char* program, int count, const char* const* options) {
  for (int i = 0; i < count; ++i) strcat(strcat(program, " "), options[i]);
  return strstr(program, "fault") ? 6 : 0;
}
int nvrtcGetProgramLogSize(char* program, size_t* size) { return *size = strlen(program) + 1, 0; }
int nvrtcGetProgramLog(char* program, char* out) { return strcpy(out, program), 0; }
int nvrtcGetCUBINSize(char* program, size_t* size) { return *size = strlen(program), 0; }
int nvrtcGetCUBIN(char* program, char* out) { return memcpy(out, program, strlen(program)), 0; }
int nvrtcDestroyProgram(void** program) { return *program = NULL, 0; }
