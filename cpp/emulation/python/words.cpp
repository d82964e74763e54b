// Tests of what a transport's contract says of words use these functions, with the control transport over TCP alone. A
// transport is closed when Python lets go of it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "emulation/link.h"
#include "emulation/python/bindings.h"
#include "python/connect.h"
#include "transport/tcp.h"

namespace py = pybind11;

namespace distca::emulation {
namespace {

using transport::Transport;

/// With a latency in seconds, behind a link.
std::unique_ptr<Transport> connect_tcp(transport::TcpListener& listener, int rank,
                                       const std::vector<std::string>& addresses, int64_t num_signals, double timeout,
                                       std::optional<double> latency) {
  auto direct =
      transport::connect_tcp(std::move(listener), rank, addresses, num_signals, python::milliseconds(timeout));
  if (!latency) return direct;
  return std::make_unique<LinkTransport>(std::move(direct), LinkOptions{1e9, python::milliseconds(*latency), false});
}

bool wait(Transport& transport, int64_t word, uint64_t value, double timeout) {
  return transport.wait(word, value, std::chrono::steady_clock::now() + python::milliseconds(timeout), nullptr);
}

/// Returns whether the peer answered, and the words.
std::pair<bool, std::vector<uint64_t>> peek_words(const Transport& transport, int peer, int64_t first, size_t count) {
  std::vector<uint64_t> values(count);
  const bool answered = transport.peek_words(peer, first, values);
  return {answered, std::move(values)};
}

/// Returns (peer, whether it left in good order) of that peer, or of the first one that is gone.
std::optional<std::pair<int, bool>> departed(const Transport& transport, std::optional<int> peer) {
  const auto gone = peer ? transport.departed(*peer) : transport.departed();
  if (!gone) return std::nullopt;
  return std::pair(gone->peer, gone->orderly);
}

}  // namespace

void bind_words(py::module_& m) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<Transport>(m, "Transport")
      .def("signal", &Transport::signal, py::arg("peer"), py::arg("word"), py::arg("value"), released)
      .def("load", &Transport::load, py::arg("word"), released)
      .def("publish", &Transport::publish, py::arg("word"), py::arg("value"), released)
      .def("peek", &Transport::peek, py::arg("peer"), py::arg("word"), released)
      .def("peek_words", &peek_words, py::arg("peer"), py::arg("first"), py::arg("count"), released)
      .def("wait", &wait, py::arg("word"), py::arg("value"), py::arg("timeout"), released)
      .def("quiet", &Transport::quiet, released)
      .def("departed", &departed, py::arg("peer") = std::nullopt);
  m.def("connect_tcp", &connect_tcp, py::kw_only(), py::arg("listener"), py::arg("rank"), py::arg("addresses"),
        py::arg("num_signals"), py::arg("timeout"), py::arg("latency") = std::nullopt, released);
}

}  // namespace distca::emulation
