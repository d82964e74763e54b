// The listeners by which ranks of several processes find each other, for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "python/bindings.h"
#include "transport/shm.h"
#include "transport/tcp.h"

namespace py = pybind11;

namespace distca::python {

void bind_transports(py::module_& m) {
  py::class_<transport::ShmListener>(m, "ShmListener")
      .def(py::init<>())
      .def_property_readonly("address", &transport::ShmListener::address);
  m.def(
      "can_share_memory",
      [](const std::vector<std::string>& addresses) { return transport::can_share_memory(addresses); },
      py::arg("addresses"));
  py::class_<transport::TcpListener>(m, "TcpListener")
      .def(py::init<const std::string&>(), py::arg("host"))
      .def_property_readonly("address", &transport::TcpListener::address);
}

}  // namespace distca::python
