// The shared memory of processes on several machines: each has a copy, and sends what its threads write to all others.
//
// A record is a place in the memory and bytes for it, or the new value of a counter. Sockets keep their order, so
// whoever sees a count has all that was sent before it, as in memory that is really shared. Machines must store numbers
// alike, and trust each other.
#pragma once
#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "exchange.h"
#include "processes.h"

namespace laneformer {

class Mirror {
 public:
  // sockets: connected to every other process; they are the mirror's now.
  Mirror(const SharedMemory& memory, Exchange& exchange, const std::vector<int>& sockets);
  ~Mirror();
  Mirror(const Mirror&) = delete;

  // These bytes of the memory, then the counter as it stands.
  void send(const std::vector<iovec>& written, const std::atomic<uint64_t>& count);

 private:
  struct Record {
    uint64_t place, value;  // kCount | place of a counter, its value; or the place of bytes that follow, their number
  };
  static constexpr uint64_t kCount = uint64_t{1} << 63;
  void receive(int socket);
  bool apply(int socket, const Record& record);

  const SharedMemory& memory_;
  Exchange& exchange_;
  const std::vector<int> sockets_;
  std::mutex mutex_;  // of senders
  std::vector<Record> records_;
  std::vector<iovec> pieces_, left_;
  std::vector<std::thread> receivers_;
};

}  // namespace laneformer
