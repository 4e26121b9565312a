// The processes over which one decoder's threads are shared out.
//
// Each of them gets every request, plans every pass and draws every token by itself: the same results give the same
// bits everywhere, so that nothing has to be told but what lanes give each other anyway, logits, and a few words at
// each meeting. Weights, keys and values of a lane are with the process that has its threads.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>
#include <stdexcept>
#include <vector>

#include "system.h"

namespace laneformer {

struct Place {
  int rank = 0, processes = 1;
  int memory = -1;           // of more than one: a file, empty at first, that all of them map
  std::vector<int> sockets;  // or that each has for itself, and these to all others (mirror.h)
};

// What a process says at a meeting of all threads.
struct alignas(128) Said {
  uint64_t plan = 0;  // a hash of the pass that it has run
  uint32_t overflowed = 0, kv_overflowed = 0;
  bool left = false;  // the request ends before the next pass; rank 0's word counts
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
    pieces_.push_back({static_cast<char*>(at), size});
    end_ += size;
    return Pages::borrowed(at);
  }

  // Where something lies, the same in all processes; and what lies there, or nullptr where nothing of that size does.
  uint64_t place_of(const void* p) const {
    uint64_t before = 0;
    for (const Piece& piece : pieces_) {
      if (is_in(piece, static_cast<const char*>(p))) return before + (static_cast<const char*>(p) - piece.at);
      before += piece.bytes;
    }
    throw std::logic_error("not in the shared memory");
  }
  char* at(uint64_t place, uint64_t bytes) const {
    for (const Piece& piece : pieces_) {
      if (place < piece.bytes) return bytes <= piece.bytes - place ? piece.at + place : nullptr;
      place -= piece.bytes;
    }
    return nullptr;
  }

 private:
  struct Piece {
    char* at;
    size_t bytes;
  };
  static bool is_in(const Piece& piece, const char* p) { return p >= piece.at && p < piece.at + piece.bytes; }

  const int file_;
  size_t end_ = 0;
  std::vector<Piece> pieces_;
};

}  // namespace laneformer
