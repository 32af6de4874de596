# Adds the CUDA handlers to _native; cudart is linked statically, so importing needs no driver.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  execute_process(COMMAND nvidia-smi -L OUTPUT_VARIABLE gpus ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed AND gpus MATCHES "GPU 0")
    set(CMAKE_CUDA_ARCHITECTURES native)
  else()
    set(CMAKE_CUDA_ARCHITECTURES 90-real 80-virtual)
  endif()
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.4)
  message(FATAL_ERROR "The CUDA kernels need CUDA 12.4 or newer, found ${CMAKE_CUDA_COMPILER_VERSION}: "
                      "set CUDACXX to another nvcc, or JAXSOFTMAX_CUDA=OFF to build without them")
endif()
find_package(CUDAToolkit REQUIRED)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)

# _native was made before CUDA was enabled, so it has not taken the architectures up.
set_property(TARGET _native PROPERTY CUDA_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES})
file(GLOB kernels CONFIGURE_DEPENDS cpp/cuda/*.cu)
target_sources(_native PRIVATE cpp/cuda/handlers.cc ${kernels})
set_source_files_properties(
  ${kernels} PROPERTIES COMPILE_OPTIONS
  # 20054: what default values shared memory would have is never read.
  "-O3;--expt-relaxed-constexpr;-Xfatbin=-compress-all;-Xptxas=-v;-diag-suppress=20012,20054")
list(JOIN CMAKE_CUDA_ARCHITECTURES " " archs)
target_compile_definitions(
  _native PRIVATE JAXSOFTMAX_CUDA="${CMAKE_CUDA_COMPILER_VERSION}" JAXSOFTMAX_CUDA_ARCHS="${archs}")
target_link_libraries(_native PRIVATE CUDA::cudart_static)
message(STATUS "jaxsoftmax: CUDA ${CMAKE_CUDA_COMPILER_VERSION} kernels for ${archs}")
