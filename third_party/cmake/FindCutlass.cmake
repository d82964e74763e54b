# The headers of CUTLASS and CuTe, as the target `cutlass`: those of the Python package nvidia-cutlass of the building
# Python, or of a checkout named by CUTLASS_DIR (variable or environment).
set(cutlass_candidates "${CUTLASS_DIR}/include" "$ENV{CUTLASS_DIR}/include")
ask_python(cutlass_package "from importlib.util import find_spec
found = find_spec('cutlass_library')
print(found.submodule_search_locations[0] if found else '')")
list(APPEND cutlass_candidates "${cutlass_package}/source/include")

# Asked anew in every configuration: the Python environment may be another one.
unset(Cutlass_INCLUDE_DIR CACHE)
find_path(Cutlass_INCLUDE_DIR cute/tensor.hpp PATHS ${cutlass_candidates} NO_DEFAULT_PATH)
if(Cutlass_INCLUDE_DIR)
  file(STRINGS "${Cutlass_INCLUDE_DIR}/cutlass/version.h" cutlass_numbers REGEX "#define CUTLASS_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9;]" "" cutlass_numbers "${cutlass_numbers}")
  string(REPLACE ";" "." Cutlass_VERSION "${cutlass_numbers}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  Cutlass REQUIRED_VARS Cutlass_INCLUDE_DIR VERSION_VAR Cutlass_VERSION
  REASON_FAILURE_MESSAGE "run: ${Python_EXECUTABLE} -m pip install --no-deps nvidia-cutlass==4.2.0.0, or set CUTLASS_DIR, or leave out what runs on a GPU: DISTCA_CUDA=0")
if(Cutlass_FOUND AND NOT TARGET cutlass)
  add_library(cutlass INTERFACE IMPORTED)
  target_include_directories(cutlass SYSTEM INTERFACE "${Cutlass_INCLUDE_DIR}")
endif()
