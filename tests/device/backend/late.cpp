// "late": an accelerator of torch, with two devices, on a machine that has none.
//
// It is a PrivateUse1 backend, so torch's own streams, events, allocators and autograd threads drive it. Device memory
// is host memory, and kernels are those of the CPU. What a real device does behind the program's back is done here as
// late as possible: a copy between device memory and pinned host memory, asked for with non_blocking, is queued on the
// current stream, and so are waits for events. They run when somebody waits for the stream or for an event on it. A
// kernel runs at once, after all that is queued on its stream.
//
// Memory is reused as a caching allocator does: a freed block is the next that its stream gets of that size, except
// while work is queued on a stream that was recorded for it. Fresh memory is overwritten, in the order of its stream.
// A wait that is missing so gives wrong bits, every time.
//
// Nothing under `lock` copies or frees a tensor, which may take the GIL: who holds the GIL may wait for `lock`.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

namespace {

constexpr auto kLate = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
constexpr size_t kAlignment = 512;
constexpr size_t kPage = 4096;
constexpr int kPoison = 0xFF;  // NaN in every floating-point type

std::mutex lock;  // guards all that is not of one thread

// --- Streams and events

struct Queue {
  std::deque<std::function<void()>> waiting;
  uint64_t ran = 0;

  uint64_t place() const { return ran + waiting.size(); }

  void run(uint64_t until) {
    while (ran < until) {
      auto work = std::move(waiting.front());
      work();
      waiting.pop_front();
      ++ran;
    }
  }

  void run_all() { run(place()); }
};

// Reached when so much of the queue has run.
struct Event {
  Queue* queue;
  uint64_t place;

  bool reached() const { return queue->ran >= place; }
};

std::vector<std::unique_ptr<Queue>> queues[kDevices];  // by stream id; the first is the default stream's

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kDevices] = {};

Queue* queue_of(c10::DeviceIndex device, c10::StreamId id) {
  auto& of_device = queues[device];
  while (of_device.size() <= static_cast<size_t>(id)) {
    of_device.push_back(std::make_unique<Queue>());
  }
  return of_device[id].get();
}

Queue* queue_of(const c10::Stream& stream) { return queue_of(stream.device_index(), stream.id()); }

Queue* current_queue(c10::DeviceIndex device) { return queue_of(device, current_stream[device]); }

// --- Memory

struct Block {
  size_t nbytes;
  Queue* home;  // null: pinned host memory
  std::set<Queue*> uses;
};

struct Parked {
  char* address;
  size_t nbytes;
  Queue* home;
  std::vector<Event> uses;
};

std::map<char*, Block> blocks;
std::map<std::pair<Queue*, size_t>, std::vector<char*>> idle;
std::vector<Parked> parked;
bool refuse_pinning = false;

thread_local bool resizing = false;  // torch copies into the fresh memory behind the stream's back

// The block that an address is in, or null.
Block* block_at(const void* address) {
  auto next = blocks.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (next == blocks.begin()) {
    return nullptr;
  }
  auto& [begin, block] = *std::prev(next);
  return address < begin + block.nbytes ? &block : nullptr;
}

void release(void* address) {
  std::lock_guard<std::mutex> guard(lock);
  auto node = blocks.extract(static_cast<char*>(address));
  Parked freed{node.key(), node.mapped().nbytes, node.mapped().home, {}};
  for (Queue* queue : node.mapped().uses) {
    freed.uses.push_back({queue, queue->place()});
  }
  parked.push_back(std::move(freed));
}

void reclaim() {
  std::vector<Parked> still;
  for (Parked& freed : parked) {
    bool free = std::all_of(freed.uses.begin(), freed.uses.end(), [](const Event& use) { return use.reached(); });
    if (free) {
      idle[{freed.home, freed.nbytes}].push_back(freed.address);
    } else {
      still.push_back(std::move(freed));
    }
  }
  parked = std::move(still);
}

c10::DataPtr take(size_t nbytes, size_t alignment, Queue* home, c10::Device device) {
  if (nbytes == 0) {
    return {nullptr, device};
  }
  nbytes = (nbytes + alignment - 1) / alignment * alignment;
  reclaim();
  auto& free = idle[{home, nbytes}];
  void* address = nullptr;
  if (!free.empty()) {
    address = free.back();
    free.pop_back();
  } else {
    TORCH_CHECK_WITH(OutOfMemoryError, posix_memalign(&address, alignment, nbytes) == 0, "late: out of memory");
  }
  blocks[static_cast<char*>(address)] = {nbytes, home, {}};
  return {address, address, &release, device};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    std::lock_guard<std::mutex> guard(lock);
    Queue* home = current_queue(current_device);
    auto memory = take(nbytes, kAlignment, home, {kLate, current_device});
    auto poison = [address = memory.get(), nbytes] { std::memset(address, kPoison, nbytes); };
    if (resizing) {
      poison();
    } else {
      home->waiting.push_back(poison);
    }
    return memory;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
} device_allocator;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    std::lock_guard<std::mutex> guard(lock);
    TORCH_CHECK(!refuse_pinning, "late: no memory can be pinned");
    return take(nbytes, kPage, nullptr, c10::DeviceType::CPU);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
} pinned_allocator;

// --- What torch asks for

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kLate; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {kLate, current_device}; }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(0 <= device.index() && device.index() < kDevices, "late: there is no device ", device);
    current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    std::lock_guard<std::mutex> guard(lock);
    queue_of(device.index(), 0);
    auto id = static_cast<c10::StreamId>(queues[device.index()].size());
    queue_of(device.index(), id);
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> guard(lock);
    return queue_of(stream)->waiting.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> guard(lock);
    queue_of(stream)->run_all();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    std::lock_guard<std::mutex> guard(lock);
    for (auto& queue : queues[device]) {
      queue->run_all();
    }
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    std::lock_guard<std::mutex> guard(lock);
    if (*event == nullptr) {
      *event = new Event;
    }
    *static_cast<Event*>(*event) = {queue_of(stream), queue_of(stream)->place()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> guard(lock);
    queue_of(stream)->waiting.push_back([until = *static_cast<Event*>(event)] { until.queue->run(until.place); });
  }
  bool queryEvent(void* event) const override {
    std::lock_guard<std::mutex> guard(lock);
    return static_cast<Event*>(event)->reached();
  }
  void synchronizeEvent(void* event) const override {
    std::lock_guard<std::mutex> guard(lock);
    static_cast<Event*>(event)->queue->run(static_cast<Event*>(event)->place);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> guard(lock);
    Block* block = block_at(memory.get());
    if (block != nullptr && block->home != queue_of(stream)) {
      block->uses.insert(queue_of(stream));
    }
  }
};

// While torch moves a storage to larger memory, which it does on the host.
struct Resizing {
  explicit Resizing(c10::Device device) : guard(device) {
    Guard().synchronizeStream(Guard().getStream(device));
    resizing = true;
  }
  ~Resizing() { resizing = false; }
  c10::DeviceGuard guard;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kLate, device}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kLate, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* address) const override {
    std::lock_guard<std::mutex> guard(lock);
    Block* block = block_at(address);
    return block != nullptr && block->home == nullptr;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    Resizing guard(storage.device());
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), nbytes);
  }
};

// --- Kernels

c10::Device device_or_current(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(kLate, current_device);
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "late: only host memory can be pinned");
  c10::DeviceGuard guard(device_or_current(device));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, &device_allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_current(device));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator, keys, c10::dtype_or_default(dtype));
}

// The same memory as a CPU tensor.
at::Tensor on_host(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype());
  auto view = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

void catch_up(const at::Tensor& tensor) {
  if (tensor.device().type() == kLate) {
    std::lock_guard<std::mutex> guard(lock);
    current_queue(tensor.device().index())->run_all();
  }
}

bool copies_late(const at::Tensor& from, const at::Tensor& to) {
  bool out = from.device().type() == kLate;
  const at::Tensor& host = out ? to : from;
  return from.device().type() != to.device().type() && from.dtype() == to.dtype() && from.sizes() == to.sizes() &&
      from.is_contiguous() && to.is_contiguous() && from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg() &&
      Hooks().isPinnedPtr(host.data_ptr());
}

void queue_copy(const at::Tensor& from, const at::Tensor& to) {
  std::lock_guard<std::mutex> guard(lock);
  bool out = from.device().type() == kLate;
  Queue* queue = current_queue((out ? from : to).device().index());
  block_at((out ? to : from).data_ptr())->uses.insert(queue);
  queue->waiting.push_back([target = to.data_ptr(), source = from.data_ptr(), nbytes = from.nbytes()] {
    std::memcpy(target, source, nbytes);
  });
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (non_blocking && copies_late(from, to)) {
    queue_copy(from, to);
  } else {
    catch_up(from);
    catch_up(to);
    on_host(to).copy_(on_host(from));
  }
  return to;
}

const at::Tensor& resize_to(const at::Tensor& tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  Resizing guard(tensor.device());
  return at::native::resize_(tensor, sizes, format);
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  resize_to(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  catch_up(tensor);
  return at::native::_local_scalar_dense_cpu(on_host(tensor));
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

// Torch's fallback to the CPU does not know convolutions: they are operations of another name on other devices.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  std::optional<at::Tensor> host_bias;
  if (bias && bias->defined()) {
    host_bias = bias->cpu();
  }
  auto output = at::convolution(input.cpu(), weight.cpu(), host_bias, stride, padding, dilation, transposed,
                                output_padding, groups);
  return output.to(input.device(), output.scalar_type());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> wanted) {
  std::vector<int64_t> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [of_input, of_weight, of_bias] =
      at::convolution_backward(gradient.cpu(), input.cpu(), weight.cpu(), bias_sizes, stride, padding, dilation,
                               transposed, output_padding, groups, wanted);
  auto back = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(input.device(), tensor.scalar_type()) : tensor;
  };
  return {back(of_input), back(of_weight), back(of_bias)};
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("resize_", resize_to);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

// They hand a copy on as it is; `on_host` knows them.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_allocator)

[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

// --- What tests ask for

extern "C" {

int late_device_count() { return kDevices; }

void late_refuse_pinning(bool refuse) {
  std::lock_guard<std::mutex> guard(lock);
  refuse_pinning = refuse;
}

// On how many streams besides its own the memory at an address was recorded.
int late_uses_of(uintptr_t address) {
  std::lock_guard<std::mutex> guard(lock);
  return static_cast<int>(block_at(reinterpret_cast<void*>(address))->uses.size());
}
}
