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

  // Every thread begins with `begin`. Where the system refuses a thread: std::runtime_error, and none is left behind.
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

  // With `mutex` held, while no job runs.
  void post(Job job) {
    job_ = std::move(job);
    left_ = static_cast<int>(threads_.size());
    ++number_;
    posted_.notify_all();
  }
  bool busy() const { return left_ > 0; }  // with `mutex` held
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return !busy(); });
  }

  std::mutex mutex;                 // also for what a job shows while it runs
  std::condition_variable changed;  // the job has ended, or shows something new

 private:
  void work(int t) {
    uint64_t done = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      posted_.wait(lock, [&] { return closing_ || number_ > done; });
      if (closing_) return;
      done = number_;
      lock.unlock();
      job_(t);
      lock.lock();
      if (--left_ == 0) changed.notify_all();
    }
  }
  void stop() {
    {
      std::lock_guard lock(mutex);
      closing_ = true;
    }
    posted_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  std::condition_variable posted_;
  std::vector<std::thread> threads_;
  Job job_;
  uint64_t number_ = 0;
  int left_ = 0;
  bool closing_ = false;
};

}  // namespace laneformer
