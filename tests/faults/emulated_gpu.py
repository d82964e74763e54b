"""Faults of the code for GPUs, which the emulated GPU shows."""

from faults.fault import Fault

STEPS = ("tests/cuda/test_emulated_gpu.py",)
GRAPHS = ("tests/cuda/test_emulated_graphs.py",)

FAULTS = [
    Fault(
        "a block of the put kernel counts its rows before all threads have copied them",
        "cuda/transport/put.cu",
        "uint32_t num_copied) {\n  __syncthreads();\n  if (threadIdx.x != 0) return;",
        "uint32_t num_copied) {\n  if (threadIdx.x != 0) return;",
        STEPS,
    ),
    Fault(
        "a thread of the put kernel writes before the first one has seen credit",
        "cuda/transport/put.cu",
        "      __syncthreads();\n      // Nobody writes any more",
        "      // Nobody writes any more",
        STEPS,
    ),
    Fault(
        "the kernel of delta leaves out the gradient of lse",
        "cuda/runtime/home_rows.cu",
        "if (rows.dlse.data != nullptr) sum -=",
        "if (false) sum -=",
        STEPS,
    ),
    Fault(
        "one stream of a rank does not wait for the other",
        "cuda/runtime/device_queue.cpp",
        "    check(cudaStreamWaitEvent(stream(which), points_[static_cast<size_t>(point)], 0), "
        '"a wait for another stream");\n    return;',
        "    return;",
        STEPS,
    ),
    Fault(
        "memory of a table is used again while a kernel may read it",
        "cuda/runtime/table_ring.h",
        'check(cudaEventRecord(places_[last_].used, stream), "an event after a kernel");',
        "static_cast<void>(stream);",
        STEPS,
    ),
    Fault(
        "a graph is captured of a table that the ring will have used again",
        "cuda/runtime/device_queue.h",
        "    require(!is_captured(on), ",
        "    require(true, ",
        STEPS,
    ),
    Fault(
        "kernels are loaded when they are first started",
        "cuda/transport/cuda_streams.cpp",
        "    load_put_kernels();\n",
        "",
        STEPS,
    ),
    Fault(
        "a replan does not wait until its tables have been read",
        "cuda/runtime/device_queue.cpp",
        "    while (read() != turns_->committed) {",
        "    while (read() > turns_->committed) {",
        GRAPHS,
    ),
    Fault(
        "attention on one stream has the scratch memory of attention on another",
        "cuda/runtime/device_backend.cpp",
        "      launch(t, aten->scratch(bytes).get(), stream);\n",
        "      static thread_local auto kept = aten->scratch(int64_t{1} << 24);\n"
        "      if (bytes <= int64_t{1} << 24) launch(t, kept.get(), stream);\n",
        ("tests/cuda/test_emulated_gpu.py",),
    ),
    Fault(
        "attention leaves no room to what carries rows",
        "cpp/runtime/dispatcher.cpp",
        "  problem.rows_travel = rows_travel();",
        "  static_cast<void>(rows_travel());",
        ("tests/cuda/test_emulated_attention.py",),
    ),
    Fault(
        "attention leaves room where no rows travel",
        "cuda/attention/cuda_attention.cpp",
        "return problem.rows_travel ? ",
        "return room > 0 ? ",
        ("tests/cuda/test_emulated_attention.py",),
    ),
    Fault(
        "a recording allocates as part of the capture",
        "cuda/runtime/table_pool.h",
        "mode_ = cudaStreamCaptureModeRelaxed;",
        "mode_ = cudaStreamCaptureModeGlobal;",
        GRAPHS,
    ),
    Fault(
        "what is awaited in a graph may come before what peers need for it",
        "cpp/transport/stream_transport.cpp",
        "  if (is_recording_) streams_->wait_for(Stream::kWork, sent_of(slot));",
        "  static_cast<void>(slot);",
        ("tests/cuda/test_emulated_graphs.py",),
    ),
    Fault(
        "a step on another stream does not come after those before",
        "cpp/transport/stream_transport.cpp",
        "for (int64_t slot = 0; slot < kNumSlots; ++slot) streams_->wait_for(Stream::kWork, end_of(slot));",
        "",
        ("tests/cuda/test_emulated_gpu.py",),
    ),
    Fault(
        "a graph is captured of steps that are not recorded",
        "cpp/runtime/context.cpp",
        "require(!is_there || is_captured(),",
        "require(true,",
        ("tests/cuda/test_emulated_graphs.py",),
    ),
    Fault(
        "a second launch of a graph is not noticed",
        "cuda/runtime/mark.cu",
        "if (transport::load_acquire(to) == turn)",
        "if (turn == 0)",
        GRAPHS,
    ),
    Fault(
        "a rank of NVSHMEM goes on though another is not ready",
        "python/distca/connect/nvshmem.py",
        "for peer, reason in enumerate(_gather(_told(problem), group, limit)):",
        "for peer, reason in enumerate([problem]):",
        ("tests/transport/test_nvshmem.py",),
    ),
]
