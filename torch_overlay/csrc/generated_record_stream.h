/* For the C++ wrappers whose plans name streams that use a block of a different stream. */

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

namespace torch_overlay {

/* Memory of a captured graph isn't reused by the allocator. */
template <class Handle> void record_stream(const Handle &tensor, CUstream stream, int device) {
    if (is_capturing(stream)) return;
    auto *found = reinterpret_cast<at::Tensor *>(static_cast<AtenTensorHandle>(tensor));
    if (found->is_cuda())
        found->record_stream(c10::cuda::getStreamFromExternal(stream, static_cast<c10::DeviceIndex>(device)));
}

} // namespace torch_overlay
