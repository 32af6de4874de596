// The CUDA FFI handlers, two an op (initialize, execute), and the device's limits.
#include "handlers.h"

#include <cuda_runtime_api.h>

#include "../ops.h"
#include "../rows.h"
#include "launch.h"

namespace jaxsoftmax::cuda {
namespace {

using Launcher = Failure (*)(DType, const LoadedRows&, Layout, const Plan&, Stage, cudaStream_t);

ffi::Error handle(const char* name, const Signature& signature, Launcher launch, Stage stage,
                  cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  const Plan& plan, std::int64_t axes, const Loads& loads) {
  auto call = decode_call(name, signature, args, rets, plan, axes, loads);
  if (call.has_error()) return call.error();
  if (auto error = check_plan(name, signature, plan, *call, call->layout); error.failure()) {
    return error;
  }
  if (call->empty) return ffi::Error::Success();
  if (!call->aligned) return invalid(name, "needs 16-byte aligned buffers, as XLA promises them");
  const Failure failure = launch(call->dtype, call->rows, call->layout, plan, stage, stream);
  if (failure.error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal("jaxsoftmax." + std::string(name) + ": kernel " + failure.kernel +
                              " of plan " + describe(plan, call->rows) + ": " +
                              cudaGetErrorString(failure.error));
}

template <Stage stage, class Handle>
auto bind(const Handle& handle) {
  const auto binding = [] {
    return bind_arguments(
        ffi::Ffi::Bind<stage == Stage::initialize ? ffi::ExecutionStage::kInitialize
                                                  : ffi::ExecutionStage::kExecute>()
            .template Ctx<ffi::PlatformStream<cudaStream_t>>());
  };
  if constexpr (stage == Stage::initialize) {
    return binding().To(handle);
  } else {
    return binding().To(handle, {ffi::Traits::kCmdBufferCompatible});
  }
}

}  // namespace

#define JAXSOFTMAX_HANDLER(symbol, name, Op, stage)                                              \
  XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame) {                                              \
    static const auto impl = [](cudaStream_t stream, ffi::RemainingArgs args,                    \
                                ffi::RemainingRets rets, Plan plan, std::int64_t axes,           \
                                Loads loads) {                                                   \
      return handle(#name, signature<Op<FastFloat>>(), launch_##name, stage, stream, args, rets, \
                    plan, axes, loads);                                                          \
    };                                                                                           \
    static const auto handler = bind<stage>(impl);                                               \
    return handler->Call(frame);                                                                 \
  }
#define JAXSOFTMAX_OP(name, Op)                                      \
  JAXSOFTMAX_HANDLER(name##_initialize, name, Op, Stage::initialize) \
  JAXSOFTMAX_HANDLER(name, name, Op, Stage::execute)
JAXSOFTMAX_OPS(JAXSOFTMAX_OP)
#undef JAXSOFTMAX_OP

bool device_limits(Limits* limits) {
  int devices = 0;
  cudaDeviceProp prop;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 ||
      cudaGetDeviceProperties(&prop, 0) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  limits->name = prop.name;
  limits->sms = prop.multiProcessorCount;
  limits->smem_per_block = static_cast<int>(prop.sharedMemPerBlockOptin);
  limits->smem_per_sm = static_cast<int>(prop.sharedMemPerMultiprocessor);
  limits->l2_bytes = prop.l2CacheSize;
  limits->max_cluster = largest_cluster();
  limits->cooperative = prop.cooperativeLaunch != 0;
  limits->major = prop.major;
  limits->minor = prop.minor;
  return true;
}

}  // namespace jaxsoftmax::cuda
