// distca._C: layouts, plans, transports and contexts for Python, and what this machine has. Its types are in
// python/distca/_C.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "attention/attention.h"
#include "attention/peak.h"
#include "common/error.h"
#include "common/interrupt.h"
#include "python/bindings.h"
#include "runtime/backend.h"
#include "runtime/cuda_library.h"

namespace py = pybind11;

namespace distca::python {
namespace {

/// Turns an error of the core into the class of that name in distca.errors.
void translate_errors(std::exception_ptr pending) {
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const Error& error) {
    if (dynamic_cast<const Interrupted*>(&error) != nullptr && raise_pending()) return;
    const py::object type = py::module_::import("distca.errors").attr(error.kind());
    py::set_error(type, error.what());
  }
}

std::tuple<bool, int, std::string> cuda_status() {
  const runtime::CudaLibrary* const library = runtime::cuda_library();
  if (library == nullptr) return {false, 0, runtime::cuda_library_problem()};
  const auto found = library->devices();
  return {true, found.count, found.problem};
}

double measure_peak_flops(int64_t dtype, int num_threads, double seconds) {
  require(dtype >= 0 && dtype < kNumDTypes, "peak: dtype number ", dtype);
  return attention::measure_peak_flops(static_cast<DType>(dtype), num_threads, seconds);
}

/// Says why the library's own kernels do not compute attention over such heads on that GPU. Empty if they do.
std::string own_attention_problem(int64_t q_heads, int64_t kv_heads, int64_t dim, int64_t v_dim, int64_t dtype,
                                  int device) {
  require(dtype >= 0 && dtype < kNumDTypes, "attention: dtype number ", dtype);
  const runtime::CudaLibrary* const library = runtime::cuda_library();
  if (library == nullptr) return message("libdistca_cuda is not there: ", runtime::cuda_library_problem());
  return library->own_attention_problem({q_heads, kv_heads, dim, v_dim, static_cast<DType>(dtype)}, device);
}

std::string chosen_attention(std::optional<std::string_view> argument, std::string_view device, int64_t q_heads,
                             int64_t kv_heads, int64_t dim, int64_t v_dim, int64_t dtype) {
  require(dtype >= 0 && dtype < kNumDTypes, "attention: dtype number ", dtype);
  return runtime::chosen_attention(argument, device, {q_heads, kv_heads, dim, v_dim, static_cast<DType>(dtype)});
}

std::string cpu_operands(int64_t dtype) {
  require(dtype >= 0 && dtype < kNumDTypes, "attention: dtype number ", dtype);
  return attention::CpuAttention().operands(static_cast<DType>(dtype));
}

void bind_machine(py::module_& m) {
  m.def("cuda_status", &cuda_status,
        "Whether libdistca_cuda is there, how many GPUs it finds, and why not where there is none.");
  m.def("chosen_attention", &chosen_attention, py::arg("argument"), py::arg("device"), py::arg("q_heads"),
        py::arg("kv_heads"), py::arg("dim"), py::arg("v_dim"), py::arg("dtype"),
        "What computes attention over such heads there, \"own\" or \"flash\", by an argument or else the environment.");
  m.def("own_attention_problem", &own_attention_problem, py::arg("q_heads"), py::arg("kv_heads"), py::arg("dim"),
        py::arg("v_dim"), py::arg("dtype"), py::arg("device"),
        "Why the library's own kernels do not compute attention over such heads on that GPU; empty where they do.");
  m.def("cpu_isas", &attention::cpu_instruction_sets,
        "The instruction sets that the CPU's kernel can use here, the best one first.");
  m.def("cpu_isa", [] { return std::string(attention::CpuAttention().isa()); });
  m.def("cpu_operands", &cpu_operands, py::arg("dtype"),
        "How the CPU's kernel multiplies inputs of a dtype: \"floats\", \"pairs\" or \"tiles\".");
  m.def("measure_peak_flops", &measure_peak_flops, py::arg("dtype"), py::arg("num_threads"), py::arg("seconds"),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace distca::python

PYBIND11_MODULE(_C, m) {
  m.doc() = "Layouts, plans, transports and contexts of distca.";
  py::register_exception_translator(&distca::python::translate_errors);
  distca::python::bind_plans(m);
  distca::python::bind_transports(m);
  distca::python::bind_contexts(m);
  distca::python::bind_machine(m);
  distca::python::watch_signals();
}
