// A model on T persistent threads that own lanes, in one process or several: executes the passes that the schedule plans
// (schedule.h).
//
// A pass sends a block of columns through all layers. A thread runs its lanes' modules without a barrier; it publishes
// each module's partial outputs in a mailbox and then counts up its own modules done (exchange.h). Only a join that
// needs other lanes waits: PRESENT for this module, PAST for the module `delay` layers ago. Where threads outnumber
// lanes, a group of threads shares each lane: its members own rows of the lane's matrices, keep a copy each of its
// residual stream, and meet within a module. Two meetings of all threads a pass: before the first thread asks for the
// next pass, and before that runs. No column's result depends on which other columns it shares the pass with, not in a
// single bit (on the matrix unit: as long as they are four or more, or fewer; kernels/amx.h).
#pragma once
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "../../schedule/schedule.h"
#include "exchange.h"
#include "kv_memory.h"
#include "model.h"
#include "processes.h"
#include "system.h"
#include "team.h"

namespace laneformer {

static_assert(kMaxColumns == kPassColumns);
constexpr int kBlockQueries = 128;  // that attention takes at a time: their scores stay in the second-level cache
constexpr int kHeadShareTiles = 2;  // what a thread takes of the head at a time
#ifndef LANEFORMER_PROBE_MIB
#define LANEFORMER_PROBE_MIB 256  // far larger than the caches
#endif
constexpr size_t kProbeBytes = size_t{LANEFORMER_PROBE_MIB} << 20;

class Decoder {
 public:
  // `threads` in each process; thread t of all stays on cpus[t % size]; with no cpus the system decides. Waits spin
  // where every thread has a processor.
  Decoder(const ModelSpec& spec, DType dtype, DType embedding_dtype, int threads, const Kernels* kernels,
          Math math, std::vector<int> cpus = {}, double processors = usable_cpus(), Place place = {});
  ~Decoder();

  // Loading; `data` is row-major in `from`. False when a value is not finite. Name checks are Python's.
  bool set_matrix(const std::string& part, int layer, const void* data, DType from);
  bool set_embedding(const void* data, DType from);
  bool set_norm(int index, const void* data, DType from);  // 2 * layer + module; 2 * layers: the final one
  void set_rope(const float* cosine, const float* sine);    // (context, d / 2) each
  bool set_bias(const std::string& part, int layer, const void* data, DType from);       // wq, wk or wv
  bool set_head_norm(const std::string& part, int layer, const void* data, DType from);  // q_norm or k_norm

  // What a cache of packed weights holds: every thread's tape, then the embedding if it is not the head. `map_part` replaces one by memory
  // that stays valid, and is not written, as long as the decoder lives.
  int parts() const { return threads() + (spec_.tied ? 0 : 1); }
  size_t part_bytes(int index) const { return index < threads() ? plans_[index].tape_bytes : embedding_bytes(); }
  char* part(int index) { return part_pages(index).bytes(); }
  void map_part(int index, const void* data) { part_pages(index) = Pages::borrowed(data), mapped_ = true; }
  void copy_parts();  // out of what was mapped, each tape by its thread: into huge pages of its memory node

  // How far ahead the tapes are prefetched: the fastest of a few distances on the loaded tapes, or `bytes` where that is
  // not negative. It changes no result. Returns the distance.
  size_t tune(int64_t bytes);

  // Where requests join, and from where their results come; rank 0's. `leave_all` does nothing in a forked child, which
  // has none of the threads, and whose mutexes may never be free.
  Schedule& schedule();
  void leave(int64_t ticket);
  void leave_all();
  void work();  // of another rank: executes passes until rank 0 has none
  void expect_loaded() const {
    if (cosine_.empty()) throw std::invalid_argument("the weights are not loaded yet");
  }

  const Kernels* kernels() const { return kernels_; }
  const ModelSpec& spec() const { return spec_; }
  bool lost() const { return exchange_.lost(); }
  int threads() const { return static_cast<int>(plans_.size()); }
  size_t weight_bytes() const;  // read per decoded token, all threads

  // For measurements. All throw std::runtime_error while a request runs.
  double probe();  // bytes/s at which the threads read memory
  void set_latency(const Latency& latency);  // of what threads of different lanes give each other; changes no result
  void set_ladder();  // of a model without a delay (else std::invalid_argument): as Ladder Residual joins

 private:
  struct Attended {  // what one call of the kernel computes: a KV head's query heads for some columns of a sequence
    int head, column, count;
  };
  struct Worker {  // what one thread touches, or one lane's group of threads
    Pages tape;
    Pages streams;          // [own lane][column][hidden]
    Pages x, y;             // [column][...]: a matrix's inputs, its outputs
    Pages prepared;         // ... the inputs as the product reads them
    Pages attended, gated;  // [column][...]: inputs of wo and w2; of the leader, for all of a lane's group
    Pages total;
    Pages query, scores, mixed, states, totals;  // [query of a block][...]: scratch of attention
    Pages widened;                               // a chunk's keys and values in fp32
    Pages partials;                              // [chunk of a column and KV head][query][...]; of the leader, too
    Pages head_inputs;                 // [head matrix][column][hidden]
    std::vector<Pages> head_prepared;  // by head matrix, as the product reads them
    std::vector<Inputs> head_x;        // one of the two
    uint64_t orders = 0;           // that it has seen
    Counter head_ready, head_taken;    // number of the pass whose inputs are there; shares of the head begun in it
  };

  // decoder.cpp: threads, loading, the loop over passes
  void reserve(int t);
  void on_all_threads(const std::function<void(int)>& job);
  void wake();
  void serve(int t);
  void run_passes(int t);
  void issue_pass();
  bool apply_ops(int t, const Pass& pass);
  void meet(int t) { exchange_.meet(Exchange::kMet, t, 0, threads()); }
  Exchange::Shape shape() const;
  void meet_group(int t);
  double probe(int t, Pages& buffer);
  void read_tape(int t, size_t most);

  // forward.cpp, attention.cpp, head.cpp: one pass
  void run_layers(int t, const Pass& pass);
  void attention(int t, int layer, int own, const Pass& pass, float* partial);
  void cache_position(int t, int layer, int own, const float* key, const float* value, Column at);
  AttendArgs queries_of(int t, int layer, int own, const Attended& block, const Pass& pass) const;
  void attend_from_nothing(const AttendArgs& a) const;
  void finish_attention(int t, const Attended& block, const float* states) const;
  void attend(int t, int layer, int own, const Pass& pass);
  void attend_chunks(int t, int layer, int own, const Pass& pass);
  void mlp(int t, int layer, int own, const Pass& pass, float* partial);
  void add_sum(int t, uint64_t number, const Pass& pass);
  void join_late(int t, int layer, Module module, const Pass& pass);
  void join_lanes(int t, int layer, Module module, const Pass& pass);
  void keep_partials(int t, int layer, Module module, const Pass& pass);
  void run_head(int t, const Pass& pass);
  void score_positions(int t, const Pass& pass);
  void replicated_inputs(int t, const Pass& pass);
  void lane_inputs(int t, const Pass& pass);
  void prepare_head(int t, const Pass& pass);
  void share_head(int t, const Pass& pass);
  void expect_finite(const float* values, int count, const Pass& pass, int row);
  bool multiply_head_share(int owner, uint64_t share, const Pass& pass);
  void sum_lane_logits(int t, const Pass& pass);
  const Product& product(DType dtype) const { return kernels_->products[int(math_)][int(dtype)]; }
  size_t prepared_bytes(DType dtype, size_t inputs) const;
  Inputs prepare(const Matrix& matrix, const float* x, int x_stride, int columns, Pages& buffer) const;
  void multiply(int owner, const Matrix& matrix, Inputs x, float* y, int y_stride, int columns);
  void multiply(int t, const Matrix& matrix, const float* x, int x_stride, float* y, int y_stride, int columns);
  void rotate(const float* from, float* to, int position) const;
  float* stream(int t, int own, int column) const;
  uint64_t first_layer(const Pass& pass) const { return (pass.number - 1) * spec_.layers; }  // of all passes together
  const float* norm_scale(int index, int lane) const;
  void wait_for_peers(int t, uint64_t modules) const {
    exchange_.wait_for(Exchange::kModulesDone, t, 0, threads(), modules);
  }

  // families.cpp: what other models' layers have beyond a Laneformer's, and tied embeddings
  void embed(int token, float* out) const;
  void add_bias(const Matrix& qkv, int layer, int lane, float* y, int y_stride, int columns) const;
  void norm_heads(int t, int layer, float* y, int y_stride, int columns);
  float* bias(int layer, int lane) const;
  float* head_norm(int layer, bool of_keys) const;
  int rope_position(int layer, int position) const { return spec_.rotates[layer] ? position : 0; }  // 0 turns nothing

  size_t embedding_bytes() const {
    return spec_.tied ? 0 : size_t(spec_.vocab) * spec_.hidden * bytes_of(embedding_dtype_);
  }
  Pages& part_pages(int index) { return index < threads() ? workers_[index].tape : embedding_; }

  const ModelSpec spec_;
  const DType dtype_, embedding_dtype_;  // of the matrices; of the embedding, which is never int8
  const Kernels* kernels_;
  const Math math_;
  const int delay_;        // 0 where no output ever arrives late
  const int ring_layers_;  // slots of the mailbox
  const std::vector<int> cpus_;
  const Place place_;
  const int first_, own_;  // of the threads: those of this process
  std::vector<ThreadPlan> plans_;
  std::vector<Worker> workers_;
  std::unique_ptr<KvMemory> kv_;
  Pages biases_, head_norms_;  // (layers, lanes, qkv rows), (layers, 2, d); padded
  Pages embedding_, norms_, final_streams_, logits_, lane_logits_;
  std::vector<float> cosine_, sine_;
  bool mapped_ = false;  // tapes or embedding are read-only
  size_t ahead_ = 3072;  // bytes of the tape to prefetch ahead, the same for all threads

  const int spin_turns_;  // before the core is given up: none where threads outnumber the processors
  SharedMemory memory_;
  Exchange exchange_;
  const Pages orders_memory_;
  Orders& orders_;
  bool ladder_ = false;

  std::unique_ptr<Schedule> schedule_;  // of rank 0
  std::atomic<int> gone_{0};  // threads that have ended as a process is lost

  // jobs are handed over under its mutex; within a request only counters are used. Ends before all that its jobs use
  std::unique_ptr<Team> team_;
  const pid_t process_ = getpid();
};

}  // namespace laneformer
