// A library of distca that a build or a machine may lack. It is loaded when it is first asked for.
#pragma once

#include <dlfcn.h>

#include <string>

namespace distca {

/// The offer of such a library. It is null where the library is missing or does not load; `problem` then says why.
template <class Offer>
struct OptionalLibrary {
  const Offer* offer = nullptr;
  std::string problem;
};

/// Loads `file` and asks its function `entry` what it offers. The file is found by the RUNPATH of the library that the
/// caller is compiled into, which is that library's own folder. It is never unloaded, because what it made may live
/// until the end.
template <class Offer>
OptionalLibrary<Offer> load_optional_library(const char* file, const char* entry) {
  void* const handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return {nullptr, dlerror()};
  const auto function = reinterpret_cast<const Offer* (*)()>(dlsym(handle, entry));
  if (function == nullptr) return {nullptr, dlerror()};
  return {function(), {}};
}

}  // namespace distca
