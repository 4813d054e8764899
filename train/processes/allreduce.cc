// Horovod's all-reduce of GPU memory, used as its PyTorch binding does; Horovod's MXNet binding cannot do this. A
// buffer is submitted before it is computed, together with the CUDA event of its completion. Meanwhile Horovod's
// processes agree on the all-reduce, and NCCL's kernel is enqueued behind the event long before the event fires. No
// host thread is involved between the gradient, the all-reduce and the optimizer.
//
// scripts/build_horovod.py compiles this file with the Horovod that it builds; allreduce.py calls it.
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <queue>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "horovod/common/common.h"
#include "horovod/common/operations.h"

using namespace horovod::common;

namespace {

class Buffer : public Tensor {
public:
  Buffer(void* data, int64_t num_elements, DataType dtype)
      : data_(data), num_elements_(num_elements), dtype_(dtype) {}
  const DataType dtype() const override { return dtype_; }
  const TensorShape shape() const override { return TensorShape({num_elements_}); }
  const void* data() const override { return data_; }
  int64_t size() const override { return num_elements_ * (dtype_ == HOROVOD_FLOAT16 ? 2 : 4); }

private:
  void* data_;
  int64_t num_elements_;
  DataType dtype_;
};

#if HAVE_CUDA
class CudaEvent : public ReadyEvent {
public:
  explicit CudaEvent(cudaEvent_t event) : event_(event) {}
  bool Ready() const override { return cudaEventQuery(event_) == cudaSuccess; }
  cudaEvent_t event() const override { return event_; }

private:
  cudaEvent_t event_;
};

// Memory in which Horovod combines several buffers, if HOROVOD_FUSION_THRESHOLD allows this.
class Joined : public PersistentBuffer {
public:
  Joined(int device, int64_t num_bytes) {
    HVD_GPU_CHECK(cudaSetDevice(device));
    HVD_GPU_CHECK(cudaMalloc(&data_, num_bytes));
  }
  ~Joined() override { cudaFree(data_); }
  const void* AccessData(std::shared_ptr<OpContext>) const override { return data_; }

private:
  void* data_ = nullptr;
};
#endif

class Context : public OpContext {
public:
  explicit Context(int device) : device_(device) {}
  Status AllocatePersistent(int64_t num_bytes, std::shared_ptr<PersistentBuffer>* buffer) override {
#if HAVE_CUDA
    if (device_ != CPU_DEVICE_ID) {
      *buffer = std::make_shared<Joined>(device_, num_bytes);
      return Status::OK();
    }
#endif
    return unsupported();
  }
  Status AllocateOutput(TensorShape, std::shared_ptr<Tensor>*, std::shared_ptr<ReadyEvent>*) override {
    return unsupported();
  }
  Status AllocateZeros(int64_t, DataType, std::shared_ptr<Tensor>*) override { return unsupported(); }
  Framework framework() const override { return Framework::MXNET; }

private:
  static Status unsupported() { return Status::PreconditionError("an all-reduce in place needs no memory"); }
  int device_;
};

// A buffer that is all-reduced in every step, and the state of its latest all-reduce. A slot is never freed, because
// Horovod may still call back.
struct Slot {
  std::mutex mutex;
  std::condition_variable changed;
  bool busy = false;
  std::string error;  // error of the latest all-reduce; empty if it succeeded

  void finish(const std::string& what) {
    std::lock_guard<std::mutex> guard(mutex);
    error = what;
    busy = false;
    changed.notify_all();
  }
};

} // namespace

extern "C" {

Slot* allreduce_slot() { return new Slot; }

// Begin replacing `num_elements` values at `data` by their mean over all processes. `device`: a GPU's number, or -1 for
// host memory, which has no events. `ready`: a cudaEvent_t, already recorded, that fires when the values are computed.
// `done`: a cudaEvent_t, recorded by the time allreduce_wait returns, that fires when the all-reduce is done.
void allreduce_start(Slot* slot, const char* name, void* data, int64_t num_elements, int is_float16, int device,
                     void* ready, void* done) {
  slot->busy = true;
  auto finished = [slot, device, done](const Status& status) {
    std::string error = status.ok() ? "" : status.reason();
#if HAVE_CUDA
    // With HOROVOD_ENABLE_ASYNC_COMPLETION the all-reduce is only enqueued on this stream by now; otherwise it is done.
    if (status.ok() && status.event.event) {
      cudaError_t fault = cudaSetDevice(device);
      if (fault == cudaSuccess) fault = cudaEventRecord(static_cast<cudaEvent_t>(done), status.event.stream);
      if (fault != cudaSuccess) error = cudaGetErrorString(fault);
    }
#endif
    slot->finish(error);
  };
  try {
    auto buffer = std::make_shared<Buffer>(data, num_elements, is_float16 ? HOROVOD_FLOAT16 : HOROVOD_FLOAT32);
    ReadyEventList ready_events;
#if HAVE_CUDA
    if (ready) ready_events.AddReadyEvent(std::make_shared<CudaEvent>(static_cast<cudaEvent_t>(ready)));
#endif
    const Status status = EnqueueTensorAllreduce(std::make_shared<Context>(device), buffer, buffer, ready_events, name,
                                                 device, finished, ReduceOp::AVERAGE);
    if (!status.ok()) slot->finish(status.reason());
  } catch (const std::exception& e) {
    slot->finish(e.what());
  }
}

// Wait until the all-reduce is enqueued on the GPU, or done on the host. Returns the error message, or null.
const char* allreduce_wait(Slot* slot) {
  std::unique_lock<std::mutex> lock(slot->mutex);
  slot->changed.wait(lock, [slot] { return !slot->busy; });
  return slot->error.empty() ? nullptr : slot->error.c_str();
}

} // extern "C"
