"""Faults of the CUDA kernels for compute capability 8.0 and later, on the emulated machine."""

from faults.fault import Fault

KERNELS = "tests/cuda/test_kernels_on_host.py"
STEPS = "tests/cuda/test_emulated_attention.py"

FAULTS = [
    Fault(
        "CUDA 8.0: a step of forward does not wait for its bytes",
        "cuda/attention/ampere_forward.h",
        "    ampere::wait_copies<Config::kStages - 2>();\n",
        "",
        (KERNELS,),
    ),
    Fault(
        "CUDA 8.0: a step of forward does not wait for the other warps",
        "cuda/attention/ampere_forward.h",
        "    gpu::sync_cta();\n    copy_next(",
        "    copy_next(",
        (KERNELS,),
    ),
    Fault(
        "CUDA 8.0: forward has one tile, which thread 0 overwrites",
        "cuda/attention/ampere_forward.h",
        "number ^= 1",
        "number *= 1",
        (KERNELS,),
    ),
    Fault(
        "CUDA 8.0: keys that nobody sees are read",
        "cuda/attention/ampere_parts.h",
        "const bool is_needed = at >= needed.begin && at < needed.end;",
        "const bool is_needed = at >= needed.begin;",
        (KERNELS,),
    ),
    Fault(
        "CUDA 8.0: columns past the head are read",
        "cuda/attention/ampere_parts.h",
        "is_needed && column + chunk * kChunkColumns < dim",
        "is_needed && column < dim",
        (KERNELS,),
    ),
    Fault(
        "CUDA 8.0: signals are not awaited",
        "cuda/attention/ampere_parts.h",
        "if (item.remote == 0) return;",
        "if (item.remote >= 0) return;",
        (KERNELS,),
    ),
    Fault(
        "CUDA 8.0: a group's keys lie at the first entry of its table",
        "cuda/attention/ampere_parts.h",
        "row / kTableRows - group.first_block",
        "0",
        (KERNELS,),
    ),
    Fault(
        "CUDA 8.0: values of the second step are those of the first",
        "cuda/attention/ampere_forward.h",
        "block * kKeys + (of_block - kKeySteps) * kKeysOfStep",
        "block * kKeys",
        (KERNELS,),
    ),
    Fault(
        "CUDA 8.0: dq is multiplied before all of dS is there",
        "cuda/attention/ampere_backward.h",
        "    gpu::sync_cta();\n    if constexpr (kStages == 1) copy_tile(",
        "    if constexpr (kStages == 1) copy_tile(",
        (KERNELS,),
    ),
    Fault(
        "CUDA 8.0: backward does not wait for the bytes of a tile",
        "cuda/attention/ampere_backward.h",
        "    ampere::wait_copies<0>();\n    gpu::sync_cta();\n    if (thread() == 0",
        "    gpu::sync_cta();\n    if (thread() == 0",
        (KERNELS,),
    ),
    Fault(
        "CUDA 8.0: dS is not transposed for dq",
        "cuda/attention/ampere_backward.h",
        "ampere::load_transposed(left[0],",
        "ampere::load_matrices(left[0],",
        (KERNELS,),
    ),
    Fault(
        "CUDA 8.0: keys that a row does not see have a probability in backward",
        "cuda/attention/ampere_backward.h",
        "    if (!is_masked) return;",
        "    if (!is_masked || stage >= 0) return;",
        (KERNELS,),
    ),
    Fault(
        "CUDA 8.0: both starts of backward take the same turns",
        "cuda/attention/ampere_backward.h",
        "kTurnsPerTile = kPasses",
        "kTurnsPerTile = 1",
        (KERNELS,),
    ),
    Fault(
        "CUDA 8.0: blocks add to dq in any order",
        "cuda/attention/ampere_backward.h",
        "if (turn != nullptr && i < kTogether) await_turn(",
        "if (turn != nullptr && i < 0) await_turn(",
        (KERNELS,),
    ),
    Fault(
        "CUDA 8.0: items store without waiting for those before them",
        "cuda/attention/ampere_backward.h",
        "if (item.before_begin != item.before_end) {",
        "if (item.before_begin > item.before_end) {",
        (KERNELS,),
    ),
    Fault(
        "CUDA 8.0: the next tile overwrites one that dk still needs",
        "cuda/attention/ampere_backward.h",
        "kMultipliesEarly = kStages == 1 || kHasValues",
        "kMultipliesEarly = kHasValues",
        (KERNELS,),
    ),
    Fault(
        "CUDA 8.0: the largest group of query heads is that of forward",
        "cuda/attention/cuda_attention.cpp",
        "std::min(kernels->forward_shape.rows, kernels->backward_shape.rows)",
        "kernels->forward_shape.rows",
        (STEPS,),
    ),
    Fault(
        "CUDA 8.0: own kernels compute where nobody chose them",
        "cuda/runtime/library.cpp",
        "return capability(device) == 90;",
        "return capability(device) >= 80;",
        (STEPS,),
    ),
]
