// The CUDA FFI handlers and the device's limits, as module.cc registers them.
#pragma once

#include <cstdint>
#include <string>

#include "../lists.h"
#include "xla/ffi/api/c_api.h"

namespace jaxsoftmax::cuda {

#define JAXSOFTMAX_OP(name, Op)                               \
  XLA_FFI_Error* name##_initialize(XLA_FFI_CallFrame* frame); \
  XLA_FFI_Error* name(XLA_FFI_CallFrame* frame);
JAXSOFTMAX_OPS(JAXSOFTMAX_OP)
#undef JAXSOFTMAX_OP

struct Limits {
  std::string name;
  int sms, smem_per_block, smem_per_sm, l2_bytes, major, minor;
  int max_cluster;  // blocks; 0: the loaded code has neither clusters nor bulk copies
  bool cooperative;
};

// Of device 0; false where there is no driver or no device.
bool device_limits(Limits* limits);

}  // namespace jaxsoftmax::cuda
