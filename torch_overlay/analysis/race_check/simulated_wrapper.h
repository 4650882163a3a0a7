/* Stands in for what a generated C++ wrapper is compiled against: each call goes to Python (`simulated_cpp`). */

#include <array>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

struct Argument {
    char kind; /* i: a number, d: a floating-point number, t: a tensor, p: an address, w: an address that may be written
                */
    int64_t number;
    double value;
};

using Call = int64_t (*)(const char *name, int count, const Argument *arguments);

static Call to_python;

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque *;
using AOTITorchError = int;

inline int64_t number_of(AtenTensorHandle handle) { return reinterpret_cast<int64_t>(handle); }

namespace torch::aot_inductor {

struct RAIIAtenTensorHandle;

}

using torch::aot_inductor::RAIIAtenTensorHandle;

template <class T> Argument argument(const T &value) {
    using Plain = std::decay_t<T>;
    if constexpr (std::is_convertible_v<T, AtenTensorHandle> && !std::is_same_v<Plain, std::nullptr_t>)
        return {'t', number_of(static_cast<AtenTensorHandle>(value)), 0};
    else if constexpr (std::is_same_v<Plain, std::nullptr_t>)
        return {'p', 0, 0};
    else if constexpr (std::is_array_v<T>)
        return {'p', reinterpret_cast<int64_t>(&value[0]), 0};
    else if constexpr (std::is_pointer_v<Plain>)
        return {std::is_const_v<std::remove_pointer_t<Plain>> ? 'p' : 'w', reinterpret_cast<int64_t>(value), 0};
    else if constexpr (std::is_floating_point_v<Plain>)
        return {'d', 0, static_cast<double>(value)};
    else
        return {'i', static_cast<int64_t>(value), 0};
}

template <class... A> int64_t call_python(const char *name, const A &...given) {
    const Argument arguments[] = {argument(given)..., {}};
    int64_t result = to_python(name, sizeof...(A), arguments);
    if (result < 0) throw std::runtime_error(name);
    return result;
}

namespace torch::aot_inductor {

struct RAIIAtenTensorHandle {
    AtenTensorHandle handle = nullptr;
    RAIIAtenTensorHandle() = default;

    RAIIAtenTensorHandle(AtenTensorHandle handle) : handle(handle) {}

    RAIIAtenTensorHandle(const RAIIAtenTensorHandle &) = delete;

    RAIIAtenTensorHandle(RAIIAtenTensorHandle &&other) noexcept : handle(other.release()) {}

    RAIIAtenTensorHandle &operator=(RAIIAtenTensorHandle &&other) {
        if (this != &other) {
            reset();
            handle = other.release();
        }
        return *this;
    }

    ~RAIIAtenTensorHandle() { reset(); }

    operator AtenTensorHandle() const { return handle; }

    AtenTensorHandle get() const { return handle; }

    AtenTensorHandle release() { return std::exchange(handle, nullptr); }

    void reset() {
        if (handle) to_python("delete", 1, std::vector<Argument>{argument(release())}.data());
    }

    void *data_ptr() const { return reinterpret_cast<void *>(call_python("data_ptr", handle)); }
};

struct AOTICudaStreamGuard {
    int64_t before;

    AOTICudaStreamGuard(void *stream, int device) : before(call_python("set_stream", stream, device)) {}

    AOTICudaStreamGuard(const AOTICudaStreamGuard &) = delete;

    ~AOTICudaStreamGuard() { call_python("restore_stream", before); }
};

} // namespace torch::aot_inductor

using torch::aot_inductor::AOTICudaStreamGuard;

struct AOTICudaGuard {
    explicit AOTICudaGuard(int device) { set_index(device); }

    void set_index(int device) { call_python("set_device", device); }
};

/* ---- the driver */

using CUresult = int;
using CUstream = void *;
using cudaStream_t = void *;
using DeviceStreamType = void *;
using CUevent = void *;
using CUcontext = void *;
using CUdevice = int;
using CUstreamCaptureStatus = int;

enum { CUDA_SUCCESS, CU_STREAM_CAPTURE_STATUS_NONE = 0, CU_EVENT_DISABLE_TIMING = 2, CU_STREAM_NON_BLOCKING = 1 };

#define CUDA_DRIVER_CHECK(call) static_cast<void>(call)
#define AOTI_TORCH_ERROR_CODE_CHECK(call) static_cast<void>(call)

inline CUresult cuDeviceGet(CUdevice *device, int index) { return *device = index, CUDA_SUCCESS; }

inline CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice) { return *context = nullptr, CUDA_SUCCESS; }

inline CUresult cuCtxGetCurrent(CUcontext *context) { return *context = nullptr, CUDA_SUCCESS; }

inline CUresult cuCtxPushCurrent(CUcontext) { return CUDA_SUCCESS; }

inline CUresult cuCtxPopCurrent(CUcontext *) { return CUDA_SUCCESS; }

inline CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus *status) { return *status = 0, CUDA_SUCCESS; }

inline CUresult cuEventCreate(CUevent *event, int) {
    *event = reinterpret_cast<CUevent>(call_python("create"));
    return CUDA_SUCCESS;
}

inline CUresult cuEventDestroy(CUevent) { return CUDA_SUCCESS; }

inline CUresult cuEventRecord(CUevent event, CUstream stream) { return call_python("record", event, stream), 0; }

inline CUresult cuStreamWaitEvent(CUstream stream, CUevent event, int) { return call_python("wait", event, stream), 0; }

inline CUresult cuEventSynchronize(CUevent event) { return call_python("synchronize", event), 0; }

inline CUresult cuStreamCreate(CUstream *stream, int) {
    *stream = reinterpret_cast<CUstream>(call_python("create_stream"));
    return CUDA_SUCCESS;
}

inline CUresult cuStreamDestroy(CUstream) { return CUDA_SUCCESS; }

inline CUresult cuStreamSynchronize(CUstream stream) { return call_python("synchronize_stream", stream), 0; }

/* ---- what a wrapper does beside */

namespace pybind11 {

struct gil_scoped_release_simple {
    ~gil_scoped_release_simple() {}
};

} // namespace pybind11

namespace py = pybind11;

inline void ensure_triton_kernel_compiles_started() {}

using Sizes = std::initializer_list<int64_t>;

template <class... A> void assert_size_stride(AtenTensorHandle, Sizes, Sizes, const A &...) {}

inline void assert_alignment(AtenTensorHandle, int64_t, const char *) {}

template <class T> RAIIAtenTensorHandle scalar_to_tensor_handle(T value) {
    return RAIIAtenTensorHandle(reinterpret_cast<AtenTensorHandle>(call_python("scalar", value)));
}

namespace c10 {

inline int64_t div_floor_integer(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

} // namespace c10

inline std::vector<RAIIAtenTensorHandle> steal_from_raw_handles_to_raii_handles(AtenTensorHandle *handles, int count) {
    std::vector<RAIIAtenTensorHandle> found;
    for (int i = 0; i < count; i++) found.emplace_back(std::exchange(handles[i], nullptr));
    return found;
}

template <class... A> AtenTensorHandle reinterpret_tensor_wrapper(const A &...given) {
    return reinterpret_cast<AtenTensorHandle>(call_python("reinterpret", given...));
}

inline RAIIAtenTensorHandle wrap_with_raii_handle_if_needed(AtenTensorHandle handle) {
    return RAIIAtenTensorHandle(handle);
}

/* A package of AOTInductor. */
using AOTIProxyExecutorHandle = void *;

struct AOTInductorModelKernels {};

struct AOTInductorModel {
    struct Constants {
        AtenTensorHandle *first;

        AtenTensorHandle &at(int i) { return first[i]; }
    } constants, *constants_ = &constants;

    int device_idx_ = 0;
    std::unique_ptr<AOTInductorModelKernels> kernels_ = std::make_unique<AOTInductorModelKernels>();

    void __check_inputs_outputs(AtenTensorHandle *, AtenTensorHandle *) {}

    void run_impl(AtenTensorHandle *, AtenTensorHandle *, DeviceStreamType, AOTIProxyExecutorHandle);
};

inline bool _check_aoti_runtime_check_inputs_env() { return false; }

#define AOTI_TORCH_WARN(message)

namespace torch_overlay {

struct PythonRegion {
    const char *spec;

    explicit PythonRegion(const char *spec) : spec(spec) {}

    bool enter(CUstream *streams, std::size_t count, int) { return call_python("enter", spec, streams, count); }

    void leave(bool is_aliased) {
        if (is_aliased) call_python("leave", spec);
    }

    void use_event(int number, const char *method, int stream) {
        call_python("use_event", spec, number, method, stream);
    }
};

template <class Handle> void record_stream(const Handle &tensor, CUstream stream, int) {
    call_python("record_stream", tensor, stream);
}

} // namespace torch_overlay
