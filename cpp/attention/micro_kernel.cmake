# add_micro_kernels(target): compiles micro_kernel.cpp into the target, once for each instruction set of a CPU.
function(add_micro_kernel target isa)
  add_library(micro_kernel_${isa} OBJECT "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/micro_kernel.cpp")
  target_include_directories(micro_kernel_${isa} PRIVATE "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/..")
  target_compile_definitions(micro_kernel_${isa} PRIVATE DISTCA_ISA=${isa})
  # GCC 12 takes the undefined operands in its own intrinsics for mistakes.
  target_compile_options(micro_kernel_${isa} PRIVATE -O3 -Wno-maybe-uninitialized ${ARGN})
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:micro_kernel_${isa}>)
endfunction()

set(avx512_flags -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512)

function(add_micro_kernels target)
  add_micro_kernel(${target} plain)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
    add_micro_kernel(${target} avx2 -mavx2 -mfma -mf16c)
    add_micro_kernel(${target} avx512 ${avx512_flags})
    add_micro_kernel(${target} avx512_bf16 ${avx512_flags} -mavx512bf16)
    add_micro_kernel(${target} amx ${avx512_flags} -mavx512bf16 -mamx-tile -mamx-bf16)
  endif()
endfunction()

# add_emulated_tiles(target): the same of instruction set amx, with its tile instructions emulated.
function(add_emulated_tiles target)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
    add_micro_kernel(${target} amx_emulated ${avx512_flags} -mavx512bf16 -DDISTCA_EMULATED_TILES)
  endif()
endfunction()
