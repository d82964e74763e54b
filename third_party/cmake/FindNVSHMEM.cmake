# NVSHMEM's headers and libraries, as the wheel nvidia-nvshmem-cu13 brings them (PyTorch's CUDA 13 wheels ask for
# 3.4.5, that of 2.15 for 3.7.2).
#
#   NVSHMEM_HOME     where to look instead of in the wheel; the variable of the environment counts too
#   NVSHMEM::host    libnvshmem_host.so.3 and the headers
#   NVSHMEM::device  what is linked into device code
#
# Asked anew in every configuration and never cached, like PyTorch's folder.
set(nvshmem_home "${NVSHMEM_HOME}")
if(NOT nvshmem_home)
  set(nvshmem_home "$ENV{NVSHMEM_HOME}")
endif()
if(NOT nvshmem_home)
  ask_python(nvshmem_home "import importlib.util as u
try:
    found = u.find_spec('nvidia.nvshmem')
except ModuleNotFoundError:
    found = None
print(list(found.submodule_search_locations)[0] if found else '')")
endif()

unset(NVSHMEM_INCLUDE_DIR CACHE)
unset(NVSHMEM_HOST_LIBRARY CACHE)
unset(NVSHMEM_DEVICE_LIBRARY CACHE)
find_path(NVSHMEM_INCLUDE_DIR nvshmem.h PATHS "${nvshmem_home}/include" NO_DEFAULT_PATH)
find_file(NVSHMEM_HOST_LIBRARY NAMES libnvshmem_host.so.3 PATHS "${nvshmem_home}/lib" NO_DEFAULT_PATH)
find_file(NVSHMEM_DEVICE_LIBRARY NAMES libnvshmem_device.a PATHS "${nvshmem_home}/lib" NO_DEFAULT_PATH)
if(NVSHMEM_INCLUDE_DIR)
  file(STRINGS "${NVSHMEM_INCLUDE_DIR}/non_abi/nvshmem_version.h" lines REGEX "define NVSHMEM_VENDOR_[A-Z]+_VERSION +[0-9]+")
  string(REGEX REPLACE "[^0-9;]" "" NVSHMEM_VERSION "${lines}")
  string(REPLACE ";" "." NVSHMEM_VERSION "${NVSHMEM_VERSION}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  NVSHMEM
  REQUIRED_VARS NVSHMEM_HOST_LIBRARY NVSHMEM_DEVICE_LIBRARY NVSHMEM_INCLUDE_DIR
  VERSION_VAR NVSHMEM_VERSION)

if(NVSHMEM_FOUND AND NOT TARGET NVSHMEM::host)
  add_library(NVSHMEM::host SHARED IMPORTED)
  set_target_properties(NVSHMEM::host PROPERTIES IMPORTED_LOCATION "${NVSHMEM_HOST_LIBRARY}"
                                                 INTERFACE_INCLUDE_DIRECTORIES "${NVSHMEM_INCLUDE_DIR}")
  add_library(NVSHMEM::device STATIC IMPORTED)
  set_target_properties(NVSHMEM::device PROPERTIES IMPORTED_LOCATION "${NVSHMEM_DEVICE_LIBRARY}")
endif()
