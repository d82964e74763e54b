# libdistca_cuda: what runs on a GPU. Built where nvcc is, loaded on demand, and loadable on a machine without a GPU or a
# driver: the CUDA runtime is linked statically, the driver is looked up at run time.
#
#   DISTCA_CUDA                 AUTO (where nvcc is found), ON, OFF
#   $ENV{TORCH_CUDA_ARCH_LIST}  the GPUs to compile for (architectures.cmake)
#
# Everything runs from compute capability 8.0 on. Attention has other kernels for 9.0, which use instructions of sm_90a.
set(DISTCA_CUDA AUTO CACHE STRING "build libdistca_cuda: AUTO (where nvcc is found), ON or OFF")
set_property(CACHE DISTCA_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT DISTCA_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "DISTCA_CUDA is ${DISTCA_CUDA}; AUTO, ON and OFF are allowed")
endif()

set(nvcc_minimum 12.8)  # the first one that knows sm_100
set(distca_cuda_found OFF)
if(NOT DISTCA_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES OFF)  # set file by file below
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    enable_language(CUDA)
    set(distca_cuda_found ON)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS nvcc_minimum)
      message(STATUS "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old, ${nvcc_minimum} is needed")
      set(distca_cuda_found OFF)
    endif()
  endif()
  if(DISTCA_CUDA STREQUAL "ON" AND NOT distca_cuda_found)
    message(FATAL_ERROR "DISTCA_CUDA=ON needs nvcc >= ${nvcc_minimum}: put it on PATH, or name it by CUDACXX=/path/to/nvcc")
  endif()
endif()

function(add_cuda_library)
  file(GLOB host_sources CONFIGURE_DEPENDS cuda/*/*.cpp)
  file(GLOB kernel_sources CONFIGURE_DEPENDS cuda/*/*.cu)
  set(hopper_sources ${kernel_sources})
  list(FILTER hopper_sources INCLUDE REGEX "/cuda/attention/hopper_")
  set(other_sources ${kernel_sources})
  list(FILTER other_sources EXCLUDE REGEX "/cuda/attention/hopper_")

  add_library(distca_cuda SHARED ${host_sources} ${kernel_sources})
  set_target_properties(distca_cuda PROPERTIES CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_VISIBILITY_PRESET hidden)
  # -DNDEBUG is part of CMAKE_CUDA_FLAGS_RELEASE: with CuTe's asserts ptxas serialises wgmma (C7510).
  set_source_files_properties(${other_sources} PROPERTIES COMPILE_OPTIONS "${gpu_options};--expt-relaxed-constexpr")
  if(hopper_sources)
    find_package(Cutlass REQUIRED)
    target_link_libraries(distca_cuda PRIVATE cutlass)
    set_source_files_properties(${hopper_sources} PROPERTIES COMPILE_OPTIONS
                                "-gencode=arch=compute_90a,code=sm_90a;--expt-relaxed-constexpr")
  endif()
  # As for the host's sources: no path of this machine in __FILE__.
  target_compile_options(
    distca_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=>")
  target_include_directories(distca_cuda PRIVATE cuda)
  target_link_libraries(distca_cuda PRIVATE distca)
  target_include_directories(distca_cuda SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  # One name leaves the library. The runtime's stay inside, so that PyTorch's copy of it is not taken for ours.
  target_link_options(distca_cuda PRIVATE -Wl,--no-undefined
                      "-Wl,--version-script=${PROJECT_SOURCE_DIR}/cuda/exports.map")
  set_target_properties(distca_cuda PROPERTIES LINK_DEPENDS "${PROJECT_SOURCE_DIR}/cuda/exports.map")
  install(TARGETS distca_cuda LIBRARY DESTINATION .)
endfunction()

if(distca_cuda_found)
  # Keeps what ptxas says of registers, shared memory and spills beside each object; `ptxas.py report` reads it.
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cuda/ptxas.py" compile)
  set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
  list(APPEND CMAKE_MODULE_PATH "${PROJECT_SOURCE_DIR}/third_party/cmake")
  include(cuda/architectures.cmake)
  read_gpu_architectures("$ENV{TORCH_CUDA_ARCH_LIST}" gpu_options gpu_architectures)
  add_cuda_library()
  include(cuda/transport/nvshmem/nvshmem.cmake)
else()
  message(STATUS "without libdistca_cuda (DISTCA_CUDA=${DISTCA_CUDA}, no nvcc in use)")
endif()
