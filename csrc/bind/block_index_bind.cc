// The prefix-block index for Python. The emulator's module has none: nothing here runs on a device.
#if !defined(SIC_SIMT)
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind/python_values.h"
#include "bind/tensor_arg.h"
#include "delta/block_index.h"

namespace sic::bind {
namespace {

using namespace delta;

// Calls are a fraction of the time that it takes to give the GIL away and get it back; loops over more than this many
// blocks are not.
constexpr int64_t kManyBlocks = 64;

Label label_of(const char* op, const char* arg, py::handle object) {
  Label label;
  if (object.is_none()) return label;
  Py_ssize_t size = 0;
  if (PyUnicode_Check(object.ptr())) {
    label.kind = Label::Kind::text;
    label.data = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
    if (!label.data) {
      PyErr_Clear();
      Check(op).fail(arg, "a string with lone surrogates", "one that has a UTF-8 form");
    }
  } else if (PyBytes_Check(object.ptr())) {
    label.kind = Label::Kind::bytes;
    label.data = PyBytes_AS_STRING(object.ptr());
    size = PyBytes_GET_SIZE(object.ptr());
  } else {
    Check(op).fail(arg, type_of(object), "str, bytes or None");
  }
  label.size = static_cast<size_t>(size);
  return label;
}

// None is 0 where `none` allows it; anything that is not a positive number of 64 bits never was a handle.
Handle handle_of(const char* op, const char* arg, py::handle object, bool none) {
  if (none && object.is_none()) return 0;
  int overflow = 1;
  const int64_t value = PyLong_Check(object.ptr()) ? PyLong_AsLongLongAndOverflow(object.ptr(), &overflow) : 0;
  if (overflow == 0 && value > 0) return static_cast<Handle>(value);
  const bool number = PyLong_Check(object.ptr());
  Check(op).fail(arg, number ? py::repr(object).cast<std::string>() : type_of(object),
                 none ? "None, or the handle of a block" : "the handle of a block");
}

// A view of an object's memory, given back when it goes.
struct BufferView {
  Py_buffer view = {};

  BufferView() = default;
  ~BufferView() {
    if (view.obj) PyBuffer_Release(&view);
  }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;
};

// The tokens of one call: a view of the caller's memory where it can be one.
class TokenArg {
 public:
  TokenArg(const char* op, py::handle object) : op_(op) {
    if (PyList_Check(object.ptr()) || PyTuple_Check(object.ptr())) {
      from_sequence(object);
    } else if (PyObject_CheckBuffer(object.ptr())) {
      from_buffer(object);
    } else if (py::hasattr(object, "__dlpack__")) {
      from_tensor(args_.emplace(op, py::none())("tokens", object));
    } else if (PySequence_Check(object.ptr()) && !PyUnicode_Check(object.ptr())) {
      from_sequence(py::reinterpret_steal<py::object>(PySequence_List(object.ptr())));
    } else {
      fail(type_of(object));
    }
  }
  TokenArg(const TokenArg&) = delete;
  TokenArg& operator=(const TokenArg&) = delete;

  const Tokens& tokens() const { return tokens_; }

 private:
  static constexpr int64_t kFew = 32;  // for these no memory is allocated

  [[noreturn]] void fail(const std::string& got) const {
    Check(op_).fail("tokens", got, "integers of 64 bits: a sequence, or an int32|int64 vector in the CPU's memory");
  }

  void from_sequence(py::handle list) {
    if (!list) throw py::error_already_set();
    const int64_t n = PySequence_Fast_GET_SIZE(list.ptr());
    int64_t* ids = wide_room(n);
    for (int64_t i = 0; i < n; ++i) {
      if (i >= PySequence_Fast_GET_SIZE(list.ptr())) fail("a list that shrank while it was read");
      PyObject* item = PySequence_Fast_GET_ITEM(list.ptr(), i);
      int overflow = 0;
      ids[i] = PyLong_AsLongLongAndOverflow(item, &overflow);
      if (overflow == 0 && !(ids[i] == -1 && PyErr_Occurred())) continue;
      PyErr_Clear();
      const std::string what = overflow ? "an integer of more than 64 bits" : type_of(item);
      fail(what + " at position " + std::to_string(i));
    }
    tokens_ = delta::tokens_of(ids, n, narrow_room(n));
  }

  void from_buffer(py::handle object) {
    Py_buffer& buffer = buffer_.view;
    if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_FORMAT | PyBUF_STRIDES) != 0) {
      PyErr_Clear();
      fail(type_of(object) + " whose memory cannot be read");
    }
    std::string format = buffer.format ? buffer.format : "B";
    if (format.size() == 2 && (format[0] == '<' || format[0] == '=' || format[0] == '@')) format.erase(0, 1);
    const bool integers = format == "i" || format == "l" || format == "q";
    if (!integers || buffer.ndim != 1 || (buffer.itemsize != 4 && buffer.itemsize != 8))
      fail(type_of(object) + " of format '" + format + "' and rank " + std::to_string(buffer.ndim));
    read(buffer.buf, buffer.shape[0], buffer.strides[0], buffer.itemsize);
  }

  void from_tensor(const TensorView& v) {
    if (v.device != Device::cpu) fail(describe(v) + " on cuda");
    if (v.rank != 1 || !kIndexInts.contains(v.dtype)) fail(describe(v));
    read(v.data, v.shape[0], v.stride_bytes(0), itemsize(v.dtype));
  }

  void read(const void* data, int64_t n, int64_t stride, int64_t width) {
    const char* p = static_cast<const char*>(data);
    const bool compact = n < 2 || stride == width;
    if (width == 4) {
      if (!compact) p = copy(narrow_room(n), p, n, stride);
      tokens_ = delta::tokens_of(reinterpret_cast<const int32_t*>(p), n);
    } else {
      if (!compact) p = copy(wide_room(n), p, n, stride);
      tokens_ = delta::tokens_of(reinterpret_cast<const int64_t*>(p), n, narrow_room(n));
    }
  }
  template <class T>
  static const char* copy(T* to, const char* from, int64_t n, int64_t stride) {
    for (int64_t i = 0; i < n; ++i) std::memcpy(to + i, from + i * stride, sizeof(T));
    return reinterpret_cast<const char*>(to);
  }

  int64_t* wide_room(int64_t n) {
    if (n <= kFew) return few_wide_;
    many_wide_.resize(static_cast<size_t>(n));
    return many_wide_.data();
  }
  int32_t* narrow_room(int64_t n) {
    if (n <= kFew) return few_;
    many_.resize(static_cast<size_t>(n));
    return many_.data();
  }

  const char* op_;
  std::optional<Args> args_;  // keeps a tensor's memory
  BufferView buffer_;
  int64_t few_wide_[kFew];
  int32_t few_[kFew];
  std::vector<int64_t> many_wide_;
  std::vector<int32_t> many_;
  Tokens tokens_;
};

BlockDigest digest_of(py::handle digest, const std::string& key) {
  if (PyUnicode_Check(digest.ptr())) return BlockDigest(digest.cast<std::string>(), key);
  if (!PyCallable_Check(digest.ptr()))
    Check("BlockIndex").fail("digest", type_of(digest), "a name, or a function of bytes");
  return BlockDigest([function = py::reinterpret_borrow<py::object>(digest)](const std::string& message) {
    const py::object name = function(py::bytes(message));
    if (!PyBytes_Check(name.ptr())) Check("BlockIndex").fail("digest", type_of(name) + " from the function", "bytes");
    return name.cast<std::string>();
  });
}

py::object handle_or_none(Handle handle) { return handle ? py::object(py::int_(handle)) : py::object(py::none()); }

py::bytes bytes_of(const BlockDigest::Name& name) { return {reinterpret_cast<const char*>(name.bytes), name.size}; }

py::object insert(BlockIndex& index, py::handle space, py::handle parent, py::handle tokens, py::handle salt,
                  py::handle value, bool pin, py::object evicted) {
  constexpr const char* op = "BlockIndex.insert";
  const TokenArg ids(op, tokens);
  const BlockKey key{label_of(op, "namespace", space), handle_of(op, "parent_handle", parent, true), ids.tokens(),
                     label_of(op, "salt", salt)};
  std::vector<int64_t> freed;
  if (!evicted.is_none() && !PyList_Check(evicted.ptr())) Check(op).fail("evicted", type_of(evicted), "a list or None");
  const auto give = [&] {  // also what went before an insertion that failed
    for (int64_t v : freed) evicted.attr("append")(v);
  };
  Handle handle = 0;
  try {
    handle = index.insert(key, int_of(op, "value", value), pin, evicted.is_none() ? nullptr : &freed);
  } catch (...) {
    give();
    throw;
  }
  give();
  return py::int_(handle);
}

py::object lookup(BlockIndex& index, py::handle space, py::handle parent, py::handle tokens, py::handle salt,
                  bool pin) {
  constexpr const char* op = "BlockIndex.lookup";
  const TokenArg ids(op, tokens);
  const BlockKey key{label_of(op, "namespace", space), handle_of(op, "parent_handle", parent, true), ids.tokens(),
                     label_of(op, "salt", salt)};
  return handle_or_none(index.lookup(key, pin));
}

std::vector<Handle> match(BlockIndex& index, py::handle space, py::handle tokens, py::handle block_size,
                          py::handle salt, bool pin) {
  constexpr const char* op = "BlockIndex.match";
  const TokenArg ids(op, tokens);
  const Label space_label = label_of(op, "namespace", space), salt_label = label_of(op, "salt", salt);
  const int64_t block = int_of(op, "block_size", block_size);
  std::optional<py::gil_scoped_release> release;
  if (index.digest().is_native() && ids.tokens().count / kManyBlocks > block) release.emplace();
  return index.match(space_label, ids.tokens(), block, salt_label, pin);
}

py::list digests(const BlockIndex& index, py::handle space, py::handle tokens, py::handle block_size, py::handle salt) {
  constexpr const char* op = "BlockIndex.digests";
  const TokenArg ids(op, tokens);
  py::list names;
  for (const auto& name : index.names(label_of(op, "namespace", space), ids.tokens(),
                                      int_of(op, "block_size", block_size), label_of(op, "salt", salt)))
    names.append(bytes_of(name));
  return names;
}

std::vector<int64_t> evict(BlockIndex& index, py::handle count) {
  const int64_t n = int_of("BlockIndex.evict", "n", count);
  std::vector<int64_t> values;
  std::optional<py::gil_scoped_release> release;
  if (n > kManyBlocks) release.emplace();
  index.evict(n, &values);
  return values;
}

py::dict stats(const BlockIndex& index) {
  const BlockIndex::Stats s = index.stats();
  py::dict d;
  d["capacity"] = s.capacity, d["entries"] = s.entries, d["pinned"] = s.pinned;
  d["hits"] = s.hits, d["misses"] = s.misses, d["collisions"] = s.collisions;
  d["insertions"] = s.insertions, d["evictions"] = s.evictions, d["removals"] = s.removals, d["bytes"] = s.bytes;
  return d;
}

// A method of a handle that must be one.
template <class Result>
auto by_handle(const char* op, Result (BlockIndex::*method)(Handle) const) {
  return [op, method](const BlockIndex& index, py::handle h) {
    return (index.*method)(handle_of(op, "handle", h, false));
  };
}
template <class Result>
auto by_handle(const char* op, Result (BlockIndex::*method)(Handle)) {
  return [op, method](BlockIndex& index, py::handle h) { return (index.*method)(handle_of(op, "handle", h, false)); };
}

}  // namespace

void bind_block_index(py::module_& m) {
  py::register_local_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const IndexFull& e) {
      py::object type = py::module_::import("sic_kernels.delta.block_index").attr("IndexFull");
      PyErr_SetString(type.ptr(), e.what());
    }
  });
  py::class_<BlockIndex>(m, "BlockIndex")
      .def(py::init([](py::handle capacity, py::handle digest, py::handle block_size, py::handle key) {
        BlockIndex::Options options;
        options.capacity = int_of("BlockIndex", "capacity", capacity);
        options.block_size = int_of("BlockIndex", "block_size", block_size);
        if (!PyBytes_Check(key.ptr())) Check("BlockIndex").fail("key", type_of(key), "bytes");
        return std::make_unique<BlockIndex>(options, digest_of(digest, key.cast<std::string>()));
      }))
      .def("insert", &insert)
      .def("lookup", &lookup)
      .def("match", &match)
      .def("digests", &digests)
      .def("evict", &evict)
      .def("clear", &BlockIndex::clear, py::call_guard<py::gil_scoped_release>())
      .def("stats", &stats)
      .def("pin", by_handle("BlockIndex.pin", &BlockIndex::pin))
      .def("unpin", by_handle("BlockIndex.unpin", &BlockIndex::unpin))
      .def("remove", by_handle("BlockIndex.remove", &BlockIndex::remove))
      .def("value", by_handle("BlockIndex.value", &BlockIndex::value))
      .def("pins", by_handle("BlockIndex.pins", &BlockIndex::pins))
      .def("children", by_handle("BlockIndex.children", &BlockIndex::children))
      .def("parent",
           [](const BlockIndex& index, py::handle h) {
             return handle_or_none(index.parent(handle_of("BlockIndex.parent", "handle", h, false)));
           })
      .def("digest",
           [](const BlockIndex& index, py::handle h) {
             return bytes_of(index.name(handle_of("BlockIndex.digest", "handle", h, false)));
           })
      .def("__contains__",
           [](const BlockIndex& index, py::handle h) {
             int overflow = 0;
             const int64_t value = PyLong_Check(h.ptr()) ? PyLong_AsLongLongAndOverflow(h.ptr(), &overflow) : 0;
             return overflow == 0 && value > 0 && index.contains(static_cast<Handle>(value));
           })
      .def("__len__", &BlockIndex::size);
}

}  // namespace sic::bind
#endif
