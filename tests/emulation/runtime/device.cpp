// The emulated device itself, and the names of errors.
#include <cuda_runtime_api.h>

#include <cstring>

#include "streams.h"

namespace {

struct Name {
  cudaError_t error;
  const char *name, *text;
};

constexpr Name kNames[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice", "no kernel image is available"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported", "not permitted while a stream captures"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated", "a capture failed because of an error"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge", "two captures would be merged"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched", "the capture did not begin in this stream"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "a capturing stream was not joined"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation", "a dependency on work outside the capture"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent", "the event was last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread", "the capture began in another thread"},
};

const Name& name_of(cudaError_t error) {
  for (const Name& one : kNames)
    if (one.error == error) return one;
  emulated_gpu::fail("an error without a name");
}

}  // namespace

const char* cudaGetErrorName(cudaError_t error) { return name_of(error).name; }
const char* cudaGetErrorString(cudaError_t error) { return name_of(error).text; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : emulated_gpu::report(cudaErrorInvalidValue);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const int major = emulated_gpu::compute_capability_major;
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? major
           : attribute == cudaDevAttrComputeCapabilityMinor ? 0
                                                            : kNumSms;
  return cudaSuccess;
}
