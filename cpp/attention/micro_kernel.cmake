# add_micro_kernels(target): compiles micro_kernel.cpp into the target, once for each instruction set of a CPU.
function(add_micro_kernel target isa)
  add_library(micro_kernel_${isa} OBJECT "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/micro_kernel.cpp")
  target_include_directories(micro_kernel_${isa} PRIVATE "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/..")
  target_compile_definitions(micro_kernel_${isa} PRIVATE DISTCA_ISA=${isa})
  # GCC 12 takes the undefined operands in its own intrinsics for mistakes.
  target_compile_options(micro_kernel_${isa} PRIVATE -O3 -Wno-maybe-uninitialized ${ARGN})
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:micro_kernel_${isa}>)
endfunction()

set(avx2_flags -mavx2 -mfma -mf16c)
set(avx512_flags -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512)

function(add_micro_kernels target)
  add_micro_kernel(${target} plain)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
    add_micro_kernel(${target} avx2 ${avx2_flags})
    add_micro_kernel(${target} avx512 ${avx512_flags})
    add_micro_kernel(${target} avx512_bf16 ${avx512_flags} -mavx512bf16)
    add_micro_kernel(${target} amx ${avx512_flags} -mavx512bf16 -mamx-tile -mamx-bf16)
  endif()
endfunction()

# add_emulated_kernels(target): the same of avx512_bf16 and of amx, with the instructions emulated that AVX2 lacks.
# GCC 12 breaks down over them at its higher levels, and with this pass.
function(add_emulated_kernels target)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
    set(flags ${avx2_flags} -mno-avx512f -O1 -Wno-psabi -DDISTCA_EMULATED_VECTORS
        $<$<CXX_COMPILER_ID:GNU>:-fno-tree-ch>)
    add_micro_kernel(${target} avx512_bf16_emulated ${flags})
    add_micro_kernel(${target} amx_emulated ${flags} -DDISTCA_EMULATED_TILES)
  endif()
endfunction()
