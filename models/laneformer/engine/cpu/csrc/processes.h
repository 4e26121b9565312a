// The processes of one machine over which one executor's threads are shared out.
//
// Rank 0 has the schedule. Its passes lie in memory that all of them map, and all threads of all processes
// execute them. Weights, keys and values of a lane are with the process that has its threads.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <new>
#include <vector>

#include "../../schedule/pass.h"
#include "exchange.h"
#include "system.h"

namespace laneformer {

struct Place {
  int rank = 0, processes = 1;
  int memory = -1;             // of more than one: a file, empty at first, that all of them map
  std::function<void()> wake;  // of rank 0: all others are to `work`
};

// What rank 0's first thread tells all threads, and what they tell it until they have met. It begins as
// zeros.
struct Orders {
  Counter issued;  // the orders so far
  bool runs;       // the last one is this pass; else its threads end
  Pass pass;
  std::atomic<int> ops;  // of the pass, from the first: for so many there was memory in every process
  std::atomic<uint32_t> overflowed, kv_overflowed;  // bit i: place i; ... as a key or value is beyond fp16
};

// Memory that all processes map, cut into pieces by the same calls in each of them; of one process, its own.
class SharedMemory {
 public:
  explicit SharedMemory(int file) : file_(file) {}
  ~SharedMemory() {
    for (const Piece& piece : pieces_) munmap(piece.at, piece.bytes);
  }
  SharedMemory(const SharedMemory&) = delete;

  // Zeroed, and there as long as this object lives.
  Pages take(size_t bytes) {
    if (file_ < 0) return Pages(bytes);
    const size_t size = (bytes / page_bytes() + 2) * page_bytes();  // its last byte, which is written now, is unused
    if (pwrite(file_, "", 1, static_cast<off_t>(end_ + size - 1)) != 1) throw std::bad_alloc();
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file_, static_cast<off_t>(end_));
    if (at == MAP_FAILED) throw std::bad_alloc();
    pieces_.push_back({at, size});
    end_ += size;
    return Pages::borrowed(at);
  }

 private:
  struct Piece {
    void* at;
    size_t bytes;
  };

  const int file_;
  size_t end_ = 0;
  std::vector<Piece> pieces_;
};

}  // namespace laneformer
