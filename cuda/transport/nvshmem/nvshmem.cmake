# libdistca_nvshmem: the transport over NVSHMEM. Built where libdistca_cuda is and the wheel is found; loaded when it is
# asked for, and not before. Its device code calls NVSHMEM's, so it is linked once more (relocatable device code).
find_package(NVSHMEM 3.4)
if(NVSHMEM_FOUND)
  add_library(
    distca_nvshmem SHARED
    cuda/transport/nvshmem/library.cpp cuda/transport/nvshmem/world.cpp cuda/transport/nvshmem/connect.cpp
    cuda/transport/nvshmem/sender.cu)
  set_target_properties(
    distca_nvshmem
    PROPERTIES CUDA_ARCHITECTURES "${gpu_architectures}" CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_VISIBILITY_PRESET hidden CUDA_SEPARABLE_COMPILATION ON
               CUDA_RESOLVE_DEVICE_SYMBOLS ON INSTALL_RPATH "$ORIGIN:$ORIGIN/../nvidia/nvshmem/lib")
  target_compile_options(distca_nvshmem PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=,-ffile-prefix-map=${NVSHMEM_INCLUDE_DIR}/=>")
  target_compile_options(distca_nvshmem PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${NVSHMEM_INCLUDE_DIR}/=>")
  target_include_directories(distca_nvshmem PRIVATE cuda)
  target_include_directories(distca_nvshmem SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_link_libraries(distca_nvshmem PRIVATE distca NVSHMEM::host NVSHMEM::device ${CMAKE_DL_LIBS})
  target_link_options(distca_nvshmem PRIVATE -Wl,--no-undefined LINKER:--exclude-libs,ALL)
  install(TARGETS distca_nvshmem LIBRARY DESTINATION .)
else()
  message(STATUS "without libdistca_nvshmem: no nvidia-nvshmem-cu13 >= 3.4 for ${Python_EXECUTABLE}; NVSHMEM_HOME names another")
endif()
