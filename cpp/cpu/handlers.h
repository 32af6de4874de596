// The CPU's FFI handlers and test hook, as module.cc registers them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../plan.h"
#include "xla/ffi/api/c_api.h"

namespace jaxsoftmax::cpu {

#define JAXSOFTMAX_OP(name, Op) XLA_FFI_Error* name(XLA_FFI_CallFrame* frame);
JAXSOFTMAX_OPS(JAXSOFTMAX_OP)
#undef JAXSOFTMAX_OP

// How often the CPU path reads each element of each input of a float32 op.
std::vector<std::vector<int>> count_reads(const std::string& op, std::int64_t rows,
                                          std::int64_t cols, const Plan& plan);

}  // namespace jaxsoftmax::cpu
