// The parts of the DLPack ABI (version 1) that the bindings read. Written from the specification.
#pragma once
#include <cstdint>

namespace sic::dlpack {

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6, kFloat8E4m3fn = 10 };

struct Device {
  int32_t type, id;
};
struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t rank;
  DataType dtype;
  int64_t *shape, *strides;  // strides in elements; null means compact
  uint64_t byte_offset;
};
struct Version {
  uint32_t major, minor;
};

// Type attribute `__dlpack_c_exchange_api__`: a capsule "dlpack_exchange_api" around this table. It reads a tensor
// without making a Python object, in tens of nanoseconds.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, Tensor* out);  // may be null
  int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
};

}  // namespace sic::dlpack
