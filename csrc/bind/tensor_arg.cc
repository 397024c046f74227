#include "bind/tensor_arg.h"

#include <pybind11/gil_safe_call_once.h>

#include <atomic>
#include <string>

#include "bind/call.h"
#include "core/dlpack_abi.h"

namespace sic::bind {
namespace {

// `__cuda_array_interface__` does not say which device: the current one.
[[maybe_unused]] int current_device() {
  return py::module_::import("torch").attr("cuda").attr("current_device")().cast<int>();
}

// Under the emulator host memory plays the device's.
#if defined(SIC_SIMT)
constexpr bool kHostIsDevice = true;
#else
constexpr bool kHostIsDevice = false;
#endif
[[maybe_unused]] PyObject* just_made = nullptr;  // by output(), with nothing in it

std::atomic<bool> check_devices{false};

DType dtype_from(dlpack::DataType t) {
  if (t.lanes != 1) return DType::other;
  switch (t.code) {
    case dlpack::kFloat:
      return t.bits == 32 ? DType::f32 : t.bits == 16 ? DType::f16 : t.bits == 64 ? DType::f64 : DType::other;
    case dlpack::kBfloat:
      return t.bits == 16 ? DType::bf16 : DType::other;
    case dlpack::kFloat8E4m3fn:
      return DType::f8e4m3;
    case dlpack::kInt:
      return t.bits == 32   ? DType::i32
             : t.bits == 64 ? DType::i64
             : t.bits == 16 ? DType::i16
             : t.bits == 8  ? DType::i8
                            : DType::other;
    case dlpack::kUInt:
      return t.bits == 8 ? DType::u8 : DType::other;
    case dlpack::kBool:
      return DType::boolean;
    default:
      return DType::other;
  }
}

TensorView view_from(const Check& check, const char* arg, const dlpack::Tensor& t) {
  check.value(t.rank <= kMaxRank, arg, t.rank, "at most 8 dimensions");
  TensorView v;
  v.dtype = dtype_from(t.dtype);
  v.data = static_cast<char*>(t.data) + t.byte_offset;
  const bool known = t.device.type == dlpack::kCpu || t.device.type == dlpack::kCudaHost ||
                     t.device.type == dlpack::kCuda || t.device.type == dlpack::kCudaManaged;
  check.require(known, arg, "an array on DLPack device type " + std::to_string(t.device.type), "one on cpu or cuda");
  const bool on_host = t.device.type == dlpack::kCpu || t.device.type == dlpack::kCudaHost;
  v.device = on_host && !kHostIsDevice ? Device::cpu : Device::cuda;
  v.device_id = t.device.id;
  v.rank = t.rank;
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    v.shape[i] = t.shape[i];
    v.stride[i] = t.strides ? t.strides[i] : stride;
    stride *= t.shape[i];
  }
  return v;
}

// The exchange table of a type, or null; looked up once per type.
const dlpack::ExchangeApi* exchange_api(PyTypeObject* type) {
  struct Known {
    PyTypeObject* type;
    const dlpack::ExchangeApi* api;
  };
  static Known known[8];
  static int count = 0;
  for (int i = 0; i < count; ++i)
    if (known[i].type == type) return known[i].api;
  const dlpack::ExchangeApi* api = nullptr;
  py::object type_object = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type));
  py::object capsule = py::getattr(type_object, "__dlpack_c_exchange_api__", py::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
    api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api->version.major != 1 || !api->tensor_from_object) api = nullptr;
  }
  if (count < 8) {
    Py_INCREF(type);  // the entry keeps the type alive: its address may not be reused
    known[count++] = {type, api};
  }
  return api;
}

[[noreturn]] void fail_not_a_tensor(const Check& check, const char* arg, py::handle object, const char* why) {
  check.fail(arg, std::string(Py_TYPE(object.ptr())->tp_name) + why, "a torch tensor or an array with DLPack");
}

// The pending Python error as an argument error; an interrupt stays what it is.
[[noreturn]] void fail_from_python(const Check& check, const char* arg, py::handle object) {
  py::error_already_set error;
  if (!error.matches(PyExc_Exception)) throw error;
  fail_not_a_tensor(check, arg, object, (" (" + py::str(error.value()).cast<std::string>() + ")").c_str());
}

TensorView from_cuda_array(const Check& check, const char* arg, const py::dict& info) {
  dlpack::Tensor t{};
  const auto typestr = info["typestr"].cast<std::string>();
  const int bytes = typestr.size() == 3 ? typestr[2] - '0' : 0;
  check.require(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8, arg, "typestr '" + typestr + "'",
                "a type of 1, 2, 4 or 8 bytes");
  const uint8_t bits = static_cast<uint8_t>(8 * bytes);
  const char kind = typestr[1];
  t.dtype = {static_cast<uint8_t>(kind == 'f'   ? dlpack::kFloat
                                  : kind == 'i' ? dlpack::kInt
                                  : kind == 'u' ? dlpack::kUInt
                                                : 255),
             bits, 1};
  t.device = {dlpack::kCuda, kHostIsDevice ? 0 : current_device()};
  t.data = reinterpret_cast<void*>(py::tuple(info["data"])[0].cast<uintptr_t>());
  int64_t shape[kMaxRank], strides[kMaxRank];
  const py::tuple dims = info["shape"];
  t.rank = static_cast<int32_t>(dims.size());
  check.value(t.rank <= kMaxRank, arg, t.rank, "at most 8 dimensions");
  const bool strided = info.contains("strides") && !info["strides"].is_none();
  for (int i = 0; i < t.rank; ++i) {
    shape[i] = dims[i].cast<int64_t>();
    if (strided) strides[i] = py::tuple(info["strides"])[i].cast<int64_t>() / (bits / 8);
  }
  t.shape = shape;
  t.strides = strided ? strides : nullptr;
  return view_from(check, arg, t);
}

}  // namespace

TensorView Args::read(const char* arg, py::handle object) {
  if (!object || object.is_none()) return {};
  const Check check(op_);
  dlpack::Tensor t;
  if (const auto* api = exchange_api(Py_TYPE(object.ptr()))) {
    if (api->tensor_from_object(object.ptr(), &t) != 0) fail_from_python(check, arg, object);
    return view_from(check, arg, t);
  }
  if (py::hasattr(object, "__dlpack__")) {
    py::object capsule;
    capsule = py::reinterpret_steal<py::object>(PyObject_CallMethod(object.ptr(), "__dlpack__", nullptr));
    if (!capsule) fail_from_python(check, arg, object);
    if (!PyCapsule_IsValid(capsule.ptr(), "dltensor"))
      fail_not_a_tensor(check, arg, object, " with another DLPack version");
    alive_.append(capsule);  // not consumed: its own destructor frees it
    return view_from(check, arg, *static_cast<dlpack::Tensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor")));
  }
  if (py::hasattr(object, "__cuda_array_interface__")) {
    try {
      return from_cuda_array(check, arg, object.attr("__cuda_array_interface__"));
    } catch (py::error_already_set&) {
      fail_not_a_tensor(check, arg, object, " with a malformed __cuda_array_interface__");
    } catch (const py::builtin_exception&) {
      fail_not_a_tensor(check, arg, object, " with a malformed __cuda_array_interface__");
    }
  }
  fail_not_a_tensor(check, arg, object, "");
}

TensorView Args::scale(const char* arg, py::handle object) {
  if (!object || object.is_none() || !(PyFloat_Check(object.ptr()) || PyLong_Check(object.ptr())))
    return (*this)(arg, object);
  numbers_[used_] = object.cast<float>();
  return view_of(&numbers_[used_++], DType::f32);
}

TensorView Args::on_device(const char* arg, py::handle object, const TensorView& view) {
#if defined(SIC_SIMT)
  const bool garbage = (object && object.ptr() == just_made) || std::string(arg) == "workspace";
  const auto contents = garbage ? simt::Contents::garbage : simt::Contents::given;
  just_made = nullptr;
  auto& kept = simt_capture() ? simt_capture()->offered : offered_;
  kept.emplace_back(simt::offer(arg, view, simt::Access::read_only, contents));
#else
  (void)arg, (void)object;
#endif
  return view;
}

void* Args::stream(py::handle array, int device_id) const {
  void* stream = nullptr;
  const auto* api = exchange_api(Py_TYPE(array.ptr()));
  if (api && !kHostIsDevice) {
    if (api->current_stream(dlpack::kCuda, device_id, &stream) != 0) throw py::error_already_set();
    return stream;
  }
  if (!api && py::str(py::type::of(array).attr("__module__")).cast<std::string>().rfind("cupy", 0) == 0) {
    const auto current = py::module_::import("cupy").attr("cuda").attr("get_current_stream")();
    return reinterpret_cast<void*>(current.attr("ptr").cast<uintptr_t>());
  }
#if defined(SIC_SIMT)
  return simt_capture() ? simt_capture()->stream : nullptr;
#else
  // A torch without the exchange table; other kinds have synchronised with the default stream as they were read.
  const py::module_ torch = py::module_::import("torch");
  if (!py::isinstance(array, torch.attr("Tensor"))) return nullptr;
  const auto current = torch.attr("cuda").attr("current_stream")(device_id);
  return reinterpret_cast<void*>(current.attr("cuda_stream").cast<uintptr_t>());
#endif
}

bool device_checks() { return check_devices.load(std::memory_order_relaxed); }
void set_device_checks(bool on) { check_devices.store(on, std::memory_order_relaxed); }

// Where torch makes a tensor beside `array`.
static py::object device_of(py::handle array, bool is_torch) {
  if (is_torch) return array.attr("device");
  if (kHostIsDevice) return py::str("cpu");
  if (py::hasattr(array, "__dlpack_device__")) {
    const py::tuple place = array.attr("__dlpack_device__")();
    const int type = py::int_(place[0]);
    if (type != dlpack::kCuda && type != dlpack::kCudaManaged) return py::str("cpu");
    return py::str("cuda:" + std::to_string(place[1].cast<int>()));
  }
  return py::str(py::hasattr(array, "__cuda_array_interface__") ? "cuda" : "cpu");
}

py::object output(py::handle given, py::handle like, std::initializer_list<int64_t> shape, DType dtype, bool zero) {
  if (given && !given.is_none()) return py::reinterpret_borrow<py::object>(given);
  struct Torch {
    py::object tensor, empty, zeros, dtypes[kNumDTypes];
  };
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Torch> storage;
  const auto make_torch = [] {
    Torch t;
    py::module_ m = py::module_::import("torch");
    t.tensor = m.attr("Tensor");
    t.empty = m.attr("empty");
    t.zeros = m.attr("zeros");
    for (DType d : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::u8, DType::i16, DType::i32, DType::i64})
      t.dtypes[static_cast<int>(d)] = m.attr(name(d));
    return t;
  };
  Torch* torch = &storage.call_once_and_store_result(make_torch).get_stored();
  py::tuple dims(shape.size());
  size_t i = 0;
  for (int64_t n : shape) dims[i++] = n;
  py::object& make = zero ? torch->zeros : torch->empty;
  const py::object& type = torch->dtypes[static_cast<int>(dtype)];
  const py::object device = device_of(like, py::isinstance(like, torch->tensor));
  py::object made = make(dims, py::arg("dtype") = type, py::arg("device") = device);
  just_made = zero ? nullptr : made.ptr();
  return made;
}

void register_errors() {
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const ArgumentError& e) {
      py::object type = py::module_::import("sic_kernels.runtime.errors").attr("ArgumentError");
      PyErr_SetString(type.ptr(), e.what());
    } catch (const WorkspaceSize& e) {
      py::object type = py::module_::import("sic_kernels.runtime.errors").attr("WorkspaceSize");
      PyErr_SetObject(type.ptr(), py::int_(e.bytes).ptr());
    } catch (const Error& e) {
      py::object type = py::module_::import("sic_kernels.runtime.errors").attr("BackendError");
      PyErr_SetString(type.ptr(), e.what());
    }
  });
}

}  // namespace sic::bind
