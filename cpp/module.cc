// The Python module _native: the handlers to register, the device's limits, and how it was built.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu/handlers.h"
#include "plan.h"
#ifdef JAXSOFTMAX_CUDA
#include "cuda/handlers.h"
#endif

namespace nb = nanobind;

namespace jaxsoftmax {
namespace {

using Handler = XLA_FFI_Error* (*)(XLA_FFI_CallFrame*);

nb::capsule capsule(Handler handler) {
  return nb::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

// {platform: {target: {stage: capsule}}}
nb::dict registrations() {
  nb::dict platforms, host;
#define JAXSOFTMAX_OP(name, Op)                    \
  {                                                \
    nb::dict stages;                               \
    stages["execute"] = capsule(cpu::name);        \
    host["jaxsoftmax." #name] = std::move(stages); \
  }
  JAXSOFTMAX_OPS(JAXSOFTMAX_OP)
#undef JAXSOFTMAX_OP
  platforms["cpu"] = std::move(host);
#ifdef JAXSOFTMAX_CUDA
  nb::dict device;
#define JAXSOFTMAX_OP(name, Op)                              \
  {                                                          \
    nb::dict stages;                                         \
    stages["initialize"] = capsule(cuda::name##_initialize); \
    stages["execute"] = capsule(cuda::name);                 \
    device["jaxsoftmax." #name] = std::move(stages);         \
  }
  JAXSOFTMAX_OPS(JAXSOFTMAX_OP)
#undef JAXSOFTMAX_OP
  platforms["CUDA"] = std::move(device);
#endif
  return platforms;
}

nb::object device_limits() {
#ifdef JAXSOFTMAX_CUDA
  cuda::Limits limits;
  if (cuda::device_limits(&limits)) {
    nb::dict out;
    out["name"] = limits.name;
    out["sms"] = limits.sms;
    out["smem_per_block"] = limits.smem_per_block;
    out["smem_per_sm"] = limits.smem_per_sm;
    out["l2_bytes"] = limits.l2_bytes;
    out["max_cluster"] = limits.max_cluster;
    out["cooperative"] = limits.cooperative;
    out["capability"] = nb::make_tuple(limits.major, limits.minor);
    return out;
  }
#endif
  return nb::none();
}

nb::dict build_info() {
  nb::dict info;
  info["ffi_api"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  info["compiler"] = __VERSION__;
#ifdef JAXSOFTMAX_CUDA
  info["cuda"] = JAXSOFTMAX_CUDA;
  info["cuda_archs"] = JAXSOFTMAX_CUDA_ARCHS;
#else
  info["cuda"] = nb::none();
  info["cuda_archs"] = nb::none();
#endif
  return info;
}

nb::tuple paths() {
#define JAXSOFTMAX_PATH(name) names.append(#name);
  nb::list names;
  JAXSOFTMAX_PATHS(JAXSOFTMAX_PATH)
#undef JAXSOFTMAX_PATH
  return nb::tuple(names);
}

nb::tuple plan_fields() {
#define JAXSOFTMAX_FIELD(name) names.append(#name);
  nb::list names;
  names.append("path");
  JAXSOFTMAX_PLAN_FIELDS(JAXSOFTMAX_FIELD)
#undef JAXSOFTMAX_FIELD
  return nb::tuple(names);
}

Plan plan_of(const nb::dict& fields) {
  Plan plan{};
  plan.path = static_cast<Path>(nb::cast<int>(fields["path"]));
#define JAXSOFTMAX_FIELD(name) plan.name = nb::cast<std::int32_t>(fields[#name]);
  JAXSOFTMAX_PLAN_FIELDS(JAXSOFTMAX_FIELD)
#undef JAXSOFTMAX_FIELD
  return plan;
}

NB_MODULE(_native, m) {
  m.doc() = "jaxsoftmax's kernels as XLA FFI handlers";
  m.def("registrations", &registrations);
  m.def("device_limits", &device_limits);
  m.def("build_info", &build_info);
  m.def("paths", &paths);
  m.def("plan_fields", &plan_fields);
  m.def(
      "count_reads",
      [](const std::string& op, std::int64_t rows, std::int64_t cols, const nb::dict& plan) {
        return cpu::count_reads(op, rows, cols, plan_of(plan));
      },
      nb::arg("op"), nb::arg("rows"), nb::arg("n"), nb::arg("plan"));
}

}  // namespace
}  // namespace jaxsoftmax
