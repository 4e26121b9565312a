#include "mirror.h"

#include <sys/socket.h>

#include <cerrno>

namespace laneformer {

namespace {
#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0  // macOS: SIGPIPE is ignored by Python
#endif

bool receive_all(int socket, void* to, size_t bytes) {
  for (auto* at = static_cast<char*>(to); bytes > 0;) {
    const ssize_t got = recv(socket, at, bytes, MSG_WAITALL);
    if (got == 0 || (got < 0 && errno != EINTR)) return false;
    if (got > 0) at += got, bytes -= got;
  }
  return true;
}

bool send_all(int socket, std::vector<iovec>& pieces) {
  constexpr size_t kMostPieces = 1024;  // of one call
  for (size_t first = 0; first < pieces.size();) {
    msghdr message{};
    message.msg_iov = &pieces[first];
    message.msg_iovlen = std::min(pieces.size() - first, kMostPieces);
    ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    for (; first < pieces.size() && size_t(sent) >= pieces[first].iov_len; ++first) sent -= pieces[first].iov_len;
    if (sent > 0) pieces[first] = {static_cast<char*>(pieces[first].iov_base) + sent, pieces[first].iov_len - sent};
  }
  return true;
}
}  // namespace

Mirror::Mirror(const SharedMemory& memory, Exchange& exchange, const std::vector<int>& sockets)
    : memory_(memory), exchange_(exchange), sockets_(sockets) {
  for (const int socket : sockets_) receivers_.emplace_back([this, socket] { receive(socket); });
}

Mirror::~Mirror() {
  for (const int socket : sockets_) shutdown(socket, SHUT_RDWR);
  for (std::thread& receiver : receivers_) receiver.join();
  for (const int socket : sockets_) close(socket);
}

void Mirror::send(const std::vector<iovec>& written, const std::atomic<uint64_t>& count) {
  std::lock_guard lock(mutex_);
  records_.clear(), pieces_.clear();
  records_.reserve(written.size() + 1);  // pieces point to them
  for (const iovec& piece : written) {
    records_.push_back({memory_.place_of(piece.iov_base), piece.iov_len});
    pieces_.push_back({&records_.back(), sizeof(Record)});
    pieces_.push_back(piece);
  }
  records_.push_back({kCount | memory_.place_of(&count), count.load(std::memory_order_relaxed)});
  pieces_.push_back({&records_.back(), sizeof(Record)});
  for (const int socket : sockets_) {
    left_ = pieces_;
    if (!send_all(socket, left_)) exchange_.lose(Exchange::kProcessLost);
  }
}

void Mirror::receive(int socket) {
  Record record;
  while (receive_all(socket, &record, sizeof record) && apply(socket, record)) {
  }
  exchange_.lose(Exchange::kProcessLost);
}

bool Mirror::apply(int socket, const Record& record) {
  const bool counts = record.place & kCount;
  char* at = memory_.at(record.place & ~kCount, counts ? sizeof(uint64_t) : record.value);
  if (!at) return false;
  if (!counts) return receive_all(socket, at, record.value);
  reinterpret_cast<std::atomic<uint64_t>*>(at)->store(record.value, std::memory_order_release);
  return true;
}

}  // namespace laneformer
