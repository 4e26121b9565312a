// Threads that run one job at a time, each with its number; they sleep between jobs.
#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace laneformer {

class Team {
 public:
  using Job = std::function<void(int)>;

  // Every thread begins with `begin`. Where the system refuses one, throws std::runtime_error, and leaves none behind.
  Team(int size, const Job& begin) {
    threads_.reserve(size);
    try {
      for (int t = 0; t < size; ++t) threads_.emplace_back([this, t, begin] { begin(t), work(t); });
    } catch (const std::exception& error) {
      const std::string number = std::to_string(threads_.size() + 1);
      stop();
      throw std::runtime_error("thread " + number + " of " + std::to_string(size) + " cannot be created (" +
                               error.what() + "): ask for fewer threads, or raise the limit (ulimit -u, ulimit -v, "
                               "a container's pids.max)");
    }
  }
  ~Team() {
    wait();
    stop();
  }
  Team(const Team&) = delete;

  int size() const { return static_cast<int>(threads_.size()); }

  // Begins a job, once all threads have left the last one.
  void post(Job job) {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return left_ == 0; });
    job_ = std::move(job);
    left_ = size();
    ++number_;
    posted_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return left_ == 0; });
  }
  void run(Job job) {
    post(std::move(job));
    wait();
  }

 private:
  void work(int t) {
    uint64_t done = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      posted_.wait(lock, [&] { return closing_ || number_ > done; });
      if (closing_) return;
      done = number_;
      lock.unlock();
      job_(t);
      lock.lock();
      if (--left_ == 0) ended_.notify_all();
    }
  }
  void stop() {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    posted_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  std::mutex mutex_;
  std::condition_variable posted_, ended_;
  std::vector<std::thread> threads_;
  Job job_;
  uint64_t number_ = 0;
  int left_ = 0;
  bool closing_ = false;
};

}  // namespace laneformer
