/* Regions with streams in generated C++: csrc/region.c and `streams.runtime`, whose Notes hold here, for C++ wrappers.
 */

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace torch_overlay {
namespace { /* a process may load packages of different versions */

using torch::aot_inductor::AOTICudaStreamGuard;
using torch::aot_inductor::RAIIAtenTensorHandle;

inline CUstream current_stream(int device) {
    void *stream = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    return static_cast<CUstream>(stream);
}

inline bool is_capturing(CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* The null stream and the creation of events depend on the current context, and a new thread has none. */
class Context {
  public:
    explicit Context(int device) {
        static thread_local std::vector<CUcontext> contexts(64, nullptr); /* a primary context stays the same */
        CUcontext now = nullptr, &mine = contexts.at(device);
        if (!mine) {
            CUdevice handle = 0;
            CUcontext found = nullptr;
            CUDA_DRIVER_CHECK(cuDeviceGet(&handle, device));
            CUDA_DRIVER_CHECK(cuDevicePrimaryCtxRetain(&found, handle));
            mine = found;
        }
        CUDA_DRIVER_CHECK(cuCtxGetCurrent(&now));
        if (now == mine) return;
        CUDA_DRIVER_CHECK(cuCtxPushCurrent(mine));
        is_pushed = true;
    }

    Context(const Context &) = delete;
    Context &operator=(const Context &) = delete;

    ~Context() {
        CUcontext old = nullptr;
        if (is_pushed) cuCtxPopCurrent(&old);
    }

  private:
    bool is_pushed = false;
};

struct Event {
    CUevent handle = nullptr;
    bool is_captured = false;
};

/* The events of a region in one thread. A call takes a set of them, and returns it when it leaves. */
struct Events {
    std::vector<std::vector<std::vector<Event>>> free; /* by device */

    ~Events() {
        for (auto &sets : free)
            for (auto &set : sets)
                for (auto &event : set)
                    cuEventDestroy(event.handle); /* the driver may be gone already: nothing to report */
    }
};

/* A call of a region. */
class Frame {
  public:
    Frame(Events &events, int device, std::size_t count, CUstream caller)
        : context(device), pool(events), device(device), caller(caller), is_captured(is_capturing(caller)) {
        if (pool.free.size() <= static_cast<std::size_t>(device)) pool.free.resize(device + 1);
        auto &sets = pool.free[device];
        if (!sets.empty()) {
            set = std::move(sets.back());
            sets.pop_back();
            return;
        }
        set.resize(count);
        for (auto &event : set) CUDA_DRIVER_CHECK(cuEventCreate(&event.handle, CU_EVENT_DISABLE_TIMING));
    }

    Frame(const Frame &) = delete;
    Frame &operator=(const Frame &) = delete;

    ~Frame() { pool.free[device].push_back(std::move(set)); }

    void record(int event, CUstream stream) { CUDA_DRIVER_CHECK(cuEventRecord(set[event].handle, stream)); }

    void record_entry(int event, CUstream stream) {
        set[event].is_captured = is_capturing(stream);
        record(event, stream);
    }

    void wait(int event, CUstream stream) { CUDA_DRIVER_CHECK(cuStreamWaitEvent(stream, set[event].handle, 0)); }

    void wait_entry(int event, CUstream stream) {
        if (set[event].is_captured || !is_captured || !is_capturing(stream)) wait(event, stream);
    }

    void wait_exit(int event, CUstream stream) {
        bool joins = is_captured && !is_capturing(stream);
        wait(event, stream);
        if (joins) wait_stream(caller, stream);
    }

    void wait_stream(CUstream stream, CUstream other) {
        CUevent event = nullptr;
        CUDA_DRIVER_CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        CUresult code = cuEventRecord(event, other);
        if (code == CUDA_SUCCESS) code = cuStreamWaitEvent(stream, event, 0);
        cuEventDestroy(event);
        CUDA_DRIVER_CHECK(code);
    }

    void synchronize(int event) { CUDA_DRIVER_CHECK(cuEventSynchronize(set[event].handle)); }

  private:
    Context context;
    Events &pool;
    int device;
    CUstream caller;
    bool is_captured;
    std::vector<Event> set;
};

/* Note [Aligned copies and the caller's memory]. `original` has the caller's tensor while `tensor` is a copy of it. */
inline void align(RAIIAtenTensorHandle &tensor, RAIIAtenTensorHandle &original, CUstream stream, int device) {
    if (!original.get()) {
        if (reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % 16 == 0) return;
        original = std::move(tensor);
    }
    AOTICudaStreamGuard guard(stream, device);
    AtenTensorHandle copy = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_clone_preserve_strides(original, &copy));
    tensor = RAIIAtenTensorHandle(copy);
}

inline void write_back(RAIIAtenTensorHandle &tensor, RAIIAtenTensorHandle &original, CUstream stream, int device) {
    if (!original.get()) return;
    AOTICudaStreamGuard guard(stream, device);
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(original, tensor, 0));
}

inline void restore(RAIIAtenTensorHandle &tensor, RAIIAtenTensorHandle &original) {
    if (original.get()) tensor = std::move(original);
}

/* Returns the caller's tensor under a name of its own. */
inline RAIIAtenTensorHandle shown(RAIIAtenTensorHandle &tensor, RAIIAtenTensorHandle &original) {
    AtenTensorHandle handle = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(original.get() ? original : tensor, &handle));
    return RAIIAtenTensorHandle(handle);
}

/* A package of AOTInductor makes its side streams itself, in each thread, for each stream that calls it: a side
   stream's memory, results as well, is reused behind the work of one caller's stream. */
class PackageRegion {
  public:
    bool enter(CUstream *streams, std::size_t count, int device) {
        static thread_local std::map<std::pair<int, CUstream>, Streams> made;
        auto &mine = made[{device, streams[0]}].handles;
        if (mine.size() + 1 < count) {
            Context context(device);
            while (mine.size() + 1 < count) {
                CUDA_DRIVER_CHECK(cuStreamCreate(&mine.emplace_back(nullptr), CU_STREAM_NON_BLOCKING));
            }
        }
        std::copy_n(mine.begin(), count - 1, streams + 1);
        return false;
    }

    void leave(bool) {}

  private:
    struct Streams {
        std::vector<CUstream> handles;

        ~Streams() {
            for (auto stream : handles) cuStreamDestroy(stream); /* as with events */
        }
    };
};

#ifdef Py_PYTHON_H

/* `streams.runtime.CppRegion`: the streams of a call, found in the running graph's table. */
class PythonRegion {
  public:
    explicit PythonRegion(const char *spec) : spec(spec) {}

    /* Returns true if two of the streams are one: Note [Streams that turn out to be one]. */
    bool enter(CUstream *streams, std::size_t count, int) {
        py::gil_scoped_acquire_simple acquire;
        if (!region) {
            RAIIPyObject module(checked(PyImport_ImportModule("torch_overlay._inductor.streams.runtime")));
            region = checked(PyObject_CallMethod(module, "CppRegion", "s", spec));
        }
        RAIIPyObject found(call("enter"));
        for (std::size_t i = 0; i < count; i++) streams[i] = static_cast<CUstream>(at(found, i));
        return at(found, count) != nullptr;
    }

    void leave(bool is_aliased) {
        if (!is_aliased) return;
        py::gil_scoped_acquire_simple acquire;
        RAIIPyObject done(call("leave"));
    }

    /* An operation on an event of the caller, which is an object of Python. */
    void use_event(int number, const char *method, int stream) {
        py::gil_scoped_acquire_simple acquire;
        RAIIPyObject done(checked(PyObject_CallMethod(region, "use_event", "isi", number, method, stream)));
    }

  private:
    const char *spec;
    PyObject *region = nullptr; /* never freed: the interpreter may be gone by then */

    static PyObject *checked(PyObject *found) {
        if (found) return found;
        PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
        PyErr_Fetch(&type, &value, &trace);
        PyErr_NormalizeException(&type, &value, &trace);
        PyObject *text = value ? PyObject_Str(value) : nullptr;
        std::string message = text ? PyUnicode_AsUTF8(text) : "a region's streams weren't found";
        Py_XDECREF(text);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        throw std::runtime_error(message);
    }

    PyObject *call(const char *method) { return checked(PyObject_CallMethod(region, method, nullptr)); }

    static void *at(PyObject *found, std::size_t i) { return PyLong_AsVoidPtr(PyTuple_GET_ITEM(found, i)); }
};

#endif

} // namespace
} // namespace torch_overlay
