// The floor for a hand-off between two processes on one GPU, from C: what no library can be faster than.
//
//   nvcc -O2 -o floor floor.cu -lcuda
//
// It forks before CUDA starts, then reads lines "KIND COUNT" from stdin and answers each with microseconds:
//   m   a round trip by stream memory operations on a shared page, of a chain of COUNT
//   e   a round trip by interprocess events, the hosts telling each other by words of the page when one was recorded
//   w   the host's cost of cuStreamWriteValue64;  a  of cuStreamWaitValue64;  r  of cudaEventRecord
#include <cuda.h>
#include <cuda_runtime.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#define CHECK(x) do { int r_ = (int)(x); if (r_) { fprintf(stderr, "line %d: error %d\n", __LINE__, r_); exit(1); } } while (0)

static double now() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e6 + t.tv_nsec * 1e-3; }

static volatile uint64_t *words;
static CUdeviceptr page;
static cudaStream_t stream;
static cudaEvent_t mine, theirs;

enum { PING = 0, PONG = 8, PING_HOST = 16, PONG_HOST = 24, READY = 32, OPENED = 40, COMMAND = 48, KIND = 49, COUNT = 50, TAKEN = 56, SCRATCH = 64, HANDLES = 128 };

static void memory_operations(int role, uint64_t base, uint64_t n) {
  for (uint64_t i = base + 1; i <= base + n; i++) {
    if (role == 0) {
      CHECK(cuStreamWriteValue64(stream, page + 8 * PING, i, 0));
      CHECK(cuStreamWaitValue64(stream, page + 8 * PONG, i, CU_STREAM_WAIT_VALUE_GEQ));
    } else {
      CHECK(cuStreamWaitValue64(stream, page + 8 * PING, i, CU_STREAM_WAIT_VALUE_GEQ));
      CHECK(cuStreamWriteValue64(stream, page + 8 * PONG, i, 0));
    }
  }
}

static void events(int role, uint64_t base, uint64_t n) {
  for (uint64_t i = base + 1; i <= base + n; i++) {
    if (role == 0) {
      CHECK(cudaEventRecord(mine, stream));
      words[PING_HOST] = i;
      while (words[PONG_HOST] < i) {}
      CHECK(cudaStreamWaitEvent(stream, theirs, 0));
    } else {
      while (words[PING_HOST] < i) {}
      CHECK(cudaStreamWaitEvent(stream, theirs, 0));
      CHECK(cudaEventRecord(mine, stream));
      words[PONG_HOST] = i;
    }
  }
}

int main() {
  char path[] = "/dev/shm/ipcsync-floor-XXXXXX";
  int fd = mkstemp(path);
  if (fd < 0 || unlink(path) || ftruncate(fd, 4096)) { perror(path); return 1; }
  words = (volatile uint64_t *)mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  int role = fork() ? 0 : 1;  // before any CUDA call
  if (role == 1) prctl(PR_SET_PDEATHSIG, SIGKILL);
  CHECK(cudaSetDevice(0));
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK(cudaHostRegister((void *)words, 4096, cudaHostRegisterMapped | cudaHostRegisterPortable));
  void *device;
  CHECK(cudaHostGetDevicePointer(&device, (void *)words, 0));
  page = (CUdeviceptr)device;
  cudaIpcEventHandle_t *handles = (cudaIpcEventHandle_t *)(words + HANDLES);
  CHECK(cudaEventCreateWithFlags(&mine, cudaEventDisableTiming | cudaEventInterprocess));
  CHECK(cudaIpcGetEventHandle(&handles[role], mine));
  words[READY + role] = 1;
  while (!words[READY + !role]) usleep(100);
  CHECK(cudaIpcOpenEventHandle(&theirs, handles[!role]));
  words[OPENED + role] = 1;
  while (!words[OPENED + !role]) usleep(100);
  uint64_t memory_base = 0, event_base = 0, commands = 0;
  for (;;) {
    char kind = 'x';
    unsigned long n = 0;
    if (role == 0) {
      if (scanf(" %c %lu", &kind, &n) != 2) kind = 'x';
      words[KIND] = kind;
      words[COUNT] = n;
      words[COMMAND] = ++commands;
      while (words[TAKEN] != commands) {}  // the peer is awake
    } else {
      while (words[COMMAND] == commands) usleep(200);
      kind = (char)words[KIND];
      n = words[COUNT];
      words[TAKEN] = ++commands;
    }
    if (kind == 'x') break;
    double start = now(), issued = 0;
    if (kind == 'm') { memory_operations(role, memory_base, n); memory_base += n; }
    else if (kind == 'e') { events(role, event_base, n); event_base += n; }
    else if (role == 0) {
      for (unsigned long i = 0; i < n; i++) {
        if (kind == 'w') CHECK(cuStreamWriteValue64(stream, page + 8 * SCRATCH, i, 0));
        else if (kind == 'a') CHECK(cuStreamWaitValue64(stream, page + 8 * SCRATCH, 0, CU_STREAM_WAIT_VALUE_GEQ));
        else CHECK(cudaEventRecord(mine, stream));
      }
      issued = now() - start;
    }
    CHECK(cudaStreamSynchronize(stream));
    if (role == 0) { printf("%.4f\n", (issued > 0 ? issued : now() - start) / n); fflush(stdout); }
  }
  if (role == 0) wait(0);
  return 0;
}
