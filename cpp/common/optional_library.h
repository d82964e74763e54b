// A library of ours that a build or a machine may lack, loaded when it is first asked for.
#pragma once

#include <dlfcn.h>

#include <string>

namespace distca {

/// What such a library offers: null where it is missing or does not load, and then why.
template <class Offer>
struct OptionalLibrary {
  const Offer* offer = nullptr;
  std::string problem;
};

/// Loads `file` and asks its function `entry` what it offers. The file is found by the RUNPATH of the library that is
/// compiled from the caller, which is its own folder. It is never unloaded: what it made may live until the end.
template <class Offer>
OptionalLibrary<Offer> load_optional_library(const char* file, const char* entry) {
  void* const handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return {nullptr, dlerror()};
  const auto function = reinterpret_cast<const Offer* (*)()>(dlsym(handle, entry));
  if (function == nullptr) return {nullptr, dlerror()};
  return {function(), {}};
}

}  // namespace distca
