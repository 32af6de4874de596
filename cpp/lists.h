// The two lists of the library: its ops and its dtypes. Everything that enumerates either expands
// these macros.
#pragma once

// X(name, Op): `name` is the FFI target's suffix, `Op` the class template of ops.h.
#define JAXSOFTMAX_OPS(X)           \
  X(softmax, Softmax)               \
  X(softmax_bwd, SoftmaxBwd)        \
  X(log_softmax, LogSoftmax)        \
  X(log_softmax_bwd, LogSoftmaxBwd) \
  X(logsumexp, Logsumexp)           \
  X(logsumexp_bwd, LogsumexpBwd)

// X(Tag): a struct of dtypes.h with the same name as in xla::ffi::DataType.
#define JAXSOFTMAX_DTYPES(X) \
  X(F16)                     \
  X(BF16)                    \
  X(F32)                     \
  X(F64)
