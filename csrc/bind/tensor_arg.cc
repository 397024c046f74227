#include "bind/tensor_arg.h"

#include <pybind11/gil_safe_call_once.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "bind/call.h"
#include "core/device.h"
#include "core/dlpack_abi.h"

namespace sic::bind {
namespace {

// `__cuda_array_interface__` does not say which device: the current one.
[[maybe_unused]] int current_device() {
  const py::object cuda = py::module_::import("torch").attr("cuda");
  return cuda.attr("is_available")().cast<bool>() ? cuda.attr("current_device")().cast<int>() : 0;
}

// Under the emulator host memory plays the device's.
#if defined(SIC_SIMT)
constexpr bool kHostIsDevice = true;
#else
constexpr bool kHostIsDevice = false;
#endif
[[maybe_unused]] PyObject* just_made = nullptr;  // by output(), with nothing in it

std::atomic<bool> check_devices{kHostIsDevice};  // a check of host memory costs nothing

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
  check.value(t.rank >= 0 && t.rank <= kMaxRank, arg, t.rank, "at most 8 dimensions");
  TensorView v;
  v.dtype = dtype_from(t.dtype);
  v.data = t.data ? static_cast<char*>(t.data) + t.byte_offset : nullptr;
  const bool known = t.device.type == dlpack::kCpu || t.device.type == dlpack::kCudaHost ||
                     t.device.type == dlpack::kCuda || t.device.type == dlpack::kCudaManaged;
  if (!known) check.fail(arg, "an array on DLPack device type " + std::to_string(t.device.type), "one on cpu or cuda");
  const bool on_host = t.device.type == dlpack::kCpu || t.device.type == dlpack::kCudaHost;
  v.device = on_host && !kHostIsDevice ? Device::cpu : Device::cuda;
  v.device_id = t.device.id;
  v.rank = t.rank;
  if (t.rank > 0 && !t.shape) check.fail(arg, "an array without a shape", "one with a shape");
  int64_t stride = 1;
  bool fits = true;
  for (int i = t.rank - 1; i >= 0; --i) {
    check.value(t.shape[i] >= 0, arg, static_cast<double>(t.shape[i]), "dimensions of 0 or more");
    v.shape[i] = t.shape[i];
    v.stride[i] = t.strides ? t.strides[i] : stride;
    fits = !__builtin_mul_overflow(stride, std::max<int64_t>(1, t.shape[i]), &stride) && fits;
  }
  constexpr int64_t kMost = int64_t{1} << 60;  // bytes of it can still be counted
  if (!fits || stride >= kMost) check.fail(arg, describe(v), "fewer than 2^60 elements");
  return v;
}

// What there is to know of a type, looked up once.
struct TypeTraits {
  const dlpack::ExchangeApi* api = nullptr;  // the exchange table, or null
  bool is_lazy = false;                      // torch: a set bit may say that the memory holds the negated numbers
};

TypeTraits traits_of(PyTypeObject* type) {
  struct Known {
    PyTypeObject* type;
    TypeTraits traits;
  };
  static Known known[8];
  static int count = 0;
  for (int i = 0; i < count; ++i)
    if (known[i].type == type) return known[i].traits;
  TypeTraits traits;
  py::object type_object = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type));
  py::object capsule = py::getattr(type_object, "__dlpack_c_exchange_api__", py::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
    traits.api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (traits.api->version.major != 1 || !traits.api->tensor_from_object) traits.api = nullptr;
  }
  traits.is_lazy = py::hasattr(type_object, "is_neg");
  if (count < 8) {
    Py_INCREF(type);  // the entry keeps the type alive: its address may not be reused
    known[count++] = {type, traits};
  }
  return traits;
}

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

[[noreturn]] void fail_not_a_tensor(const Check& check, const char* arg, py::handle object, const std::string& why) {
  check.fail(arg, type_name(object) + why, "a torch tensor or an array with DLPack");
}

// The first line of what str() or repr() say, which may themselves fail.
std::string shown(py::handle value, PyObject* (*as_text)(PyObject*)) {
  constexpr size_t kLongest = 200;
  const py::object text = py::reinterpret_steal<py::object>(as_text(value.ptr()));
  const char* utf8 = text ? PyUnicode_AsUTF8(text.ptr()) : nullptr;
  if (!utf8) PyErr_Clear();
  const std::string line = utf8 ? utf8 : type_name(value);
  return line.substr(0, std::min(line.find('\n'), kLongest));
}

// The pending Python error as an argument error; an interrupt stays what it is, and so does a lack of memory.
[[noreturn]] void fail_from_python(const Check& check, const char* arg, py::handle object) {
  py::error_already_set error;
  if (!error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError)) throw error;
  fail_not_a_tensor(check, arg, object, " (" + shown(error.value(), PyObject_Str) + ")");
}

// An attribute; null where there is none.
py::object attribute(const Check& check, const char* arg, py::handle object, const char* name) {
  PyObject* found = PyObject_GetAttrString(object.ptr(), name);
  if (!found && !PyErr_ExceptionMatches(PyExc_AttributeError)) fail_from_python(check, arg, object);
  if (!found) PyErr_Clear();
  return py::reinterpret_steal<py::object>(found);
}

void refuse_negated(const Check& check, const char* arg, py::handle object) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  const py::object negated = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object.ptr(), name));
  if (!negated) fail_from_python(check, arg, object);
  if (negated.ptr() == Py_True)
    check.fail(arg, type_name(object) + " with the negative bit set", "numbers as they are in memory: resolve_neg()");
}

bool as_int(py::handle value, int64_t& n) {
  if (!value || !PyIndex_Check(value.ptr())) return false;
  const py::object exact = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  int overflow = 0;
  n = exact ? PyLong_AsLongLongAndOverflow(exact.ptr(), &overflow) : 0;
  if (!exact) PyErr_Clear();
  return exact && !overflow;
}

// `__cuda_array_interface__`, versions 0 to 3, entry by entry.
class CudaArray {
 public:
  CudaArray(const Check& check, const char* arg, py::handle object, const py::object& info)
      : check_(check), arg_(arg), object_(object), info_(info) {
    if (!PyDict_Check(info.ptr())) bad("", info, "a dictionary");
    int64_t version = 0;
    if (const py::object v = entry("version"); v && !(as_int(v, version) && version >= 0 && version <= 3))
      bad("version ", v, "0 to 3");
    if (const py::object mask = entry("mask")) bad("mask ", mask, "an array without a mask");
  }

  TensorView view() {
    dlpack::Tensor t{};
    t.dtype = type();
    t.device = {dlpack::kCuda, kHostIsDevice ? 0 : current_device()};
    int64_t shape[kMaxRank], strides[kMaxRank];
    t.rank = numbers("shape ", entry("shape"), shape);
    for (int i = 0; i < t.rank; ++i)
      if (shape[i] < 0) bad("shape ", entry("shape"), "dimensions of 0 or more");
    t.shape = shape;
    if (const py::object given = entry("strides")) {
      const int bytes = t.dtype.bits / 8;
      const int rank = numbers("strides ", given, strides);
      bool ok = rank == t.rank;
      for (int i = 0; i < rank; ++i) ok = ok && strides[i] % bytes == 0, strides[i] /= bytes;
      if (!ok) bad("strides ", given, "a multiple of the item size for each dimension");
      t.strides = strides;
    }
    t.data = data();
    return view_from(check_, arg_, t);
  }

  // Whether it has a stream to wait for.
  bool stream(void** handle) {
    const py::object given = entry("stream");
    if (!given) return false;
    int64_t n = 0;
    if (!as_int(given, n) || n <= 0) bad("stream ", given, "None, 1, 2 or a cudaStream_t");
    *handle = reinterpret_cast<void*>(n);
    return true;
  }

  bool read_only() { return read_only_; }

 private:
  [[noreturn]] void bad(const char* what, py::handle value, const char* expected) {
    check_.fail(arg_,
                type_name(object_) + " with " + what + (value ? shown(value, PyObject_Repr) : "missing") +
                    " in its __cuda_array_interface__",
                expected);
  }

  // Null if it is None or not there.
  py::object entry(const char* name) {
    PyObject* value = PyDict_GetItemString(info_.ptr(), name);
    return py::reinterpret_borrow<py::object>(value == Py_None ? nullptr : value);
  }

  int numbers(const char* what, const py::object& given, int64_t* into) {
    const char* expected = "a tuple of at most 8 integers";
    if (!given || !(PyTuple_Check(given.ptr()) || PyList_Check(given.ptr()))) bad(what, given, expected);
    const auto values = py::reinterpret_borrow<py::sequence>(given);
    if (values.size() > kMaxRank) bad(what, given, expected);
    int n = 0;
    for (py::handle value : values)
      if (!as_int(value, into[n++])) bad(what, given, expected);
    return n;
  }

  dlpack::DataType type() {
    const py::object given = entry("typestr");
    const char* text = given && PyUnicode_Check(given.ptr()) ? PyUnicode_AsUTF8(given.ptr()) : nullptr;
    if (!text) PyErr_Clear();
    const std::string s = text ? text : "";
    const int bytes = s.size() == 3 ? s[2] - '0' : 0;
    const bool sized = bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8;
    const bool native = sized && (s[0] == '<' || s[0] == '=' || (s[0] == '|' && bytes == 1));
    if (!native) bad("typestr ", given, "a little-endian type of 1, 2, 4 or 8 bytes");
    const int code = s[1] == 'f'   ? dlpack::kFloat
                     : s[1] == 'i' ? dlpack::kInt
                     : s[1] == 'u' ? dlpack::kUInt
                     : s[1] == 'b' ? dlpack::kBool
                                   : 255;
    return {static_cast<uint8_t>(code), static_cast<uint8_t>(8 * bytes), 1};
  }

  void* data() {
    const py::object given = entry("data");
    const char* expected = "an address and whether it is read-only";
    if (!given || !PyTuple_Check(given.ptr()) || PyTuple_GET_SIZE(given.ptr()) != 2) bad("data ", given, expected);
    int64_t address = 0;
    if (!as_int(PyTuple_GET_ITEM(given.ptr(), 0), address) || address < 0) bad("data ", given, expected);
    read_only_ = PyTuple_GET_ITEM(given.ptr(), 1) == Py_True;
    return reinterpret_cast<void*>(address);
  }

  const Check& check_;
  const char* arg_;
  py::handle object_;
  py::object info_;
  bool read_only_ = false;
};

bool is_cupy(py::handle object) {
  const py::object module = py::getattr(py::type::of(object), "__module__", py::none());
  return PyUnicode_Check(module.ptr()) && module.cast<std::string>().rfind("cupy", 0) == 0;
}

// 1 is the default stream, 2 that of the thread; CUDA knows both by these numbers, the emulator has only the first.
void* stream_handle(void* given) {
  const auto n = reinterpret_cast<uintptr_t>(given);
  return n == 1 || (n == 2 && kHostIsDevice) ? nullptr : given;
}

void* cupy_stream() {
  const auto current = py::module_::import("cupy").attr("cuda").attr("get_current_stream")();
  return stream_handle(reinterpret_cast<void*>(current.attr("ptr").cast<uintptr_t>()));
}

}  // namespace

TensorView Args::read(const char* arg, py::handle object, bool written) {
  if (!object || object.is_none()) return {};
  const Check check(op_);
  dlpack::Tensor t;
  const TypeTraits traits = traits_of(Py_TYPE(object.ptr()));
  if (traits.is_lazy && !PyType_Check(object.ptr())) refuse_negated(check, arg, object);
  if (traits.api) {
    if (traits.api->tensor_from_object(object.ptr(), &t) != 0) fail_from_python(check, arg, object);
    return view_from(check, arg, t);
  }
  if (const py::object dlpack = attribute(check, arg, object, "__dlpack__"))
    return read_dlpack(check, arg, object, dlpack);
  const py::object info = attribute(check, arg, object, "__cuda_array_interface__");
  if (!info) fail_not_a_tensor(check, arg, object, "");
  CudaArray array(check, arg, object, info);
  const TensorView view = array.view();
  if (written && array.read_only()) check.fail(arg, describe(view) + " that is read-only", "an array to write to");
  void* stream = nullptr;
  if (array.stream(&stream)) producers_.push_back(stream_handle(stream));
  return view;
}

TensorView Args::read_dlpack(const Check& check, const char* arg, py::handle object, py::handle dlpack) {
  // CuPy need not wait: its stream is the call's, or is waited for. Others make the default stream wait for them.
  const bool cupy = is_cupy(object);
  const py::object capsule = py::reinterpret_steal<py::object>(
      cupy ? PyObject_Call(dlpack.ptr(), py::tuple().ptr(), py::dict(py::arg("stream") = -1).ptr())
           : PyObject_CallNoArgs(dlpack.ptr()));
  if (!capsule) fail_from_python(check, arg, object);
  if (!PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    const char* name = PyCapsule_CheckExact(capsule.ptr()) ? PyCapsule_GetName(capsule.ptr()) : nullptr;
    const std::string got = name ? "the capsule " + std::string(name) : type_name(capsule);
    check.fail(arg, type_name(object) + " whose __dlpack__ gives " + got, "an unused capsule dltensor");
  }
  alive_.append(capsule);  // not consumed: its own destructor frees it
  const auto& t = *static_cast<dlpack::Tensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  const TensorView view = view_from(check, arg, t);
  if (t.device.type == dlpack::kCuda) producers_.push_back(cupy ? cupy_stream() : nullptr);
  return view;
}

TensorView Args::scale(const char* arg, py::handle object) {
  PyObject* const given = object.ptr();
  if (!given || given == Py_None) return {};
  const PyNumberMethods* as_number = Py_TYPE(given)->tp_as_number;  // NumPy's numbers too, which are no arrays
  const bool number = PyFloat_Check(given) || PyLong_Check(given) ||
                      (as_number && as_number->nb_float && !py::hasattr(object, "__dlpack__") &&
                       !py::hasattr(object, "__cuda_array_interface__"));
  if (!number) return (*this)(arg, object);
  const double value = PyBool_Check(given) ? -1.0 : PyFloat_AsDouble(given);
  if (PyBool_Check(given) || (value == -1.0 && PyErr_Occurred())) {
    PyErr_Clear();
    Check(op_).fail(arg, shown(object, PyObject_Repr), "a number or a tensor");
  }
  numbers_[used_] = static_cast<float>(value);
  return view_of(&numbers_[used_++], DType::f32);
}

TensorView Args::workspace(py::handle object) {
  const TensorView view = read("workspace", object, true);
  if (view.given()) {
    const Extent room(view);
    for (const Memory& m : memories_)
      if (room.shares(m.extent))
        Check(op_).fail("workspace", describe(view) + " in the memory of " + m.arg, "memory of its own");
  }
  offer("workspace", object, view);
  return view;
}

TensorView Args::keep(const char* arg, py::handle object, const TensorView& view) {
  if (view.given() && memories_.capacity()) memories_.push_back({arg, Extent(view)});
  offer(arg, object, view);
  return view;
}

void Args::offer(const char* arg, py::handle object, const TensorView& view) {
#if defined(SIC_SIMT)
  const bool garbage = (object && object.ptr() == just_made) || std::string(arg) == "workspace";
  const auto contents = garbage ? simt::Contents::garbage : simt::Contents::given;
  just_made = nullptr;
  SimtCapture* capture = simt_capture();
  if (capture && object) capture->alive.append(object);
  auto& kept = capture ? capture->offered : offered_;
  kept.emplace_back(simt::offer(arg, view, simt::Access::read_only, contents));
#else
  (void)arg, (void)object, (void)view;
#endif
}

void Args::wait_for_arrays(void* stream, int device_id) const {
  if (producers_.empty()) return;
  const DeviceGuard guard(device_id);
  for (auto p = producers_.begin(); p != producers_.end(); ++p)
    if (*p != stream && std::find(producers_.begin(), p, *p) == p) wait_for(stream, *p);
}

void* Args::stream(py::handle array, int device_id) const {
  void* stream = nullptr;
  const auto* api = traits_of(Py_TYPE(array.ptr())).api;
  if (api && !kHostIsDevice) {
    if (api->current_stream(dlpack::kCuda, device_id, &stream) != 0) throw py::error_already_set();
    return stream;
  }
  if (!api && is_cupy(array)) return cupy_stream();
#if defined(SIC_SIMT)
  return simt_capture() ? simt_capture()->stream : nullptr;
#else
  // A torch without the exchange table; other kinds have the default stream.
  const py::module_ torch = py::module_::import("torch");
  if (!py::isinstance(array, torch.attr("Tensor"))) return nullptr;
  const auto current = torch.attr("cuda").attr("current_stream")(device_id);
  return reinterpret_cast<void*>(current.attr("cuda_stream").cast<uintptr_t>());
#endif
}

#if !defined(SIC_CUDA) && !defined(SIC_SIMT)
// Without CUDA kernels other backends may still have a GPU.
static void read_by_torch(void* to, const void* from, int64_t bytes) {
  const py::gil_scoped_acquire gil;
  py::dict info;
  info["version"] = 3, info["typestr"] = "|u1", info["shape"] = py::make_tuple(bytes);
  info["data"] = py::make_tuple(reinterpret_cast<uintptr_t>(from), false);
  const py::object array =
      py::module_::import("types").attr("SimpleNamespace")(py::arg("__cuda_array_interface__") = info);
  const py::object host = py::module_::import("torch").attr("as_tensor")(array).attr("cpu")();
  std::memcpy(to, reinterpret_cast<const void*>(host.attr("data_ptr")().cast<uintptr_t>()), static_cast<size_t>(bytes));
}
#endif

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
    for (DType d : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::u8, DType::i16, DType::i32, DType::i64,
                    DType::f64, DType::boolean})
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
#if !defined(SIC_CUDA) && !defined(SIC_SIMT)
  device_reader = read_by_torch;
#endif
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
