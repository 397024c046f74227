// The memory pool and the table of slots for Python. The emulator's module has neither: nothing here runs on a device.
#if !defined(SIC_SIMT)
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/python_values.h"
#include "bind/tensor_arg.h"
#include "replay/memory_pool.h"
#include "replay/slot_table.h"

namespace sic::bind {
namespace {

using namespace replay;
using Shape = std::vector<int64_t>;
using Quotas = std::vector<std::pair<std::string, int64_t>>;

// Calls of some hundred nanoseconds keep the GIL, for giving it away takes as long; those that touch memory do not.
using Released = py::call_guard<py::gil_scoped_release>;

// The memory of a pool as a buffer, which keeps it mapped.
struct PoolMemory {
  std::shared_ptr<Mapping> mapping;
  int64_t offset, bytes;
};

// With what the binding needs to know beside the pool.
struct BoundPool {
  std::unique_ptr<MemoryPool> pool;
  bool poison;  // alloc and free go through their memory
  MemoryPool* operator->() const { return pool.get(); }
};

std::vector<Part> parts_of(const Quotas& quotas) {
  std::vector<Part> parts;
  for (const auto& [name, bytes] : quotas) parts.push_back({name, bytes});
  return parts;
}

py::tuple alloc(const BoundPool& pool, int part, int64_t nbytes, int64_t alignment, std::string name, std::string dtype,
                Shape shape) {
  const MemoryPool::Request request{part, nbytes, alignment, std::move(name), std::move(dtype), std::move(shape)};
  std::optional<py::gil_scoped_release> release;
  if (pool.poison) release.emplace();
  const BlockRef block = pool->alloc(request);
  release.reset();
  return py::make_tuple(block.offset, block.generation);
}

void free_block(const BoundPool& pool, int64_t offset, uint64_t generation) {
  std::optional<py::gil_scoped_release> release;
  if (pool.poison) release.emplace();
  pool->free({offset, generation});
}

py::tuple tuple_of(const BlockRecord& r) {
  return py::make_tuple(r.offset, r.nbytes, r.generation, r.name, r.dtype, r.shape);
}

py::object named(const BoundPool& pool, const std::string& name) {
  const BlockRecord record = pool->named(name);
  return record.name.empty() ? py::object(py::none()) : tuple_of(record);
}

py::list all_named(const BoundPool& pool) {
  py::list all;
  for (const BlockRecord& record : pool->all_named()) all.append(tuple_of(record));
  return all;
}

py::list stats(const BoundPool& pool) {
  py::list all;
  for (const auto& s : pool->stats())
    all.append(py::make_tuple(s.quota, s.used, s.peak, s.largest_free, s.blocks, s.free_extents, s.allocations));
  return all;
}

py::list parts(const BoundPool& pool) {
  py::list all;
  for (const Part& part : pool->parts()) all.append(py::make_tuple(part.name, part.bytes));
  return all;
}

constexpr int64_t kMostLayer = (int64_t{1} << 31) - 1;

SlotKey key_of(const char* op, py::handle fingerprint, py::handle prefix, py::handle layer) {
  SlotKey key;
  const auto copy = [&](const char* arg, py::handle bytes, uint8_t* to) {
    const bool fits = PyBytes_Check(bytes.ptr()) && PyBytes_GET_SIZE(bytes.ptr()) == 16;
    if (!fits) Check(op).fail(arg, type_of(bytes), "a digest of 16 bytes");
    std::memcpy(to, PyBytes_AS_STRING(bytes.ptr()), 16);
  };
  copy("fingerprint", fingerprint, key.fingerprint);
  copy("prefix", prefix, key.prefix);
  const int64_t number = int_of(op, "layer", layer);
  if (number < 0 || number > kMostLayer) Check(op).fail("layer", std::to_string(number), "0 to 2^31 - 1");
  key.layer = static_cast<int32_t>(number);
  return key;
}

py::object generation_or_none(uint64_t generation) {
  return generation ? py::object(py::int_(generation)) : py::object(py::none());
}

py::object lookup(SlotTable& table, py::handle fingerprint, py::handle prefix, py::handle layer, bool approximate,
                  bool pin) {
  Slot slot{};
  table.lookup(key_of("SlotStore.get", fingerprint, prefix, layer), approximate, pin, &slot);
  return generation_or_none(slot.generation);
}

py::object insert(SlotTable& table, py::handle fingerprint, py::handle prefix, py::handle layer, int64_t offset,
                  int64_t nbytes, uint64_t generation, bool exact) {
  const SlotKey key = key_of("SlotStore.put", fingerprint, prefix, layer);
  return generation_or_none(table.insert(key, {offset, nbytes, generation, exact}).generation);
}

void check_insert(const SlotTable& table, py::handle fingerprint, py::handle prefix, py::handle layer, bool exact) {
  table.check_insert(key_of("SlotStore.put", fingerprint, prefix, layer), exact);
}

py::object evict(SlotTable& table) {
  Slot slot{};
  table.evict(&slot);
  return generation_or_none(slot.generation);
}

// A method of one entry.
auto of_entry(const char* op, void (SlotTable::*method)(const SlotKey&, uint64_t)) {
  return [op, method](SlotTable& table, py::handle fingerprint, py::handle prefix, py::handle layer,
                      uint64_t generation) { (table.*method)(key_of(op, fingerprint, prefix, layer), generation); };
}

py::dict slot_stats(const SlotTable& table) {
  const SlotTable::Stats s = table.stats();
  py::dict d;
  d["capacity"] = s.capacity, d["entries"] = s.entries, d["pinned"] = s.pinned, d["approximate"] = s.approximate;
  d["hits"] = s.hits, d["misses"] = s.misses, d["collisions"] = s.collisions;
  d["insertions"] = s.insertions, d["evictions"] = s.evictions, d["table_bytes"] = s.bytes;
  return d;
}

void register_pool_errors() {
  py::register_local_exception_translator([](std::exception_ptr p) {
    const auto raise = [](const char* type, const std::exception& e) {
      const py::object error = py::module_::import("sic_kernels.replay.errors").attr(type);
      PyErr_SetString(error.ptr(), e.what());
    };
    try {
      if (p) std::rethrow_exception(p);
    } catch (const PoolFull& e) {
      raise("PoolExhausted", e);
    } catch (const PoolError& e) {
      raise("PoolError", e);
    }
  });
}

void bind_pool(py::module_& m) {
  py::class_<PoolMemory>(m, "PoolMemory", py::buffer_protocol()).def_buffer([](const PoolMemory& memory) {
    char* data = memory.mapping->data() + memory.offset;
    return py::buffer_info(data, 1, py::format_descriptor<uint8_t>::format(), 1, {memory.bytes}, {1});
  });
  py::class_<BoundPool>(m, "MemoryPool")
      .def(py::init([](const Quotas& quotas, bool has_memory, bool poison) {
        return BoundPool{std::make_unique<MemoryPool>(parts_of(quotas), MemoryPool::Options{has_memory, poison}),
                         poison};
      }))
      .def_static(
          "create",
          [](const std::string& path, const Quotas& quotas, int64_t max_names, bool poison) {
            return BoundPool{MemoryPool::create(path, parts_of(quotas), max_names, poison), poison};
          },
          Released())
      .def_static(
          "attach",
          [](const std::string& path, bool poison) { return BoundPool{MemoryPool::attach(path, poison), poison}; },
          Released())
      .def("alloc", &alloc)
      .def("free", &free_block)
      .def("rename",
           [](const BoundPool& pool, int64_t offset, uint64_t generation, const std::string& name,
              const std::string& dtype, const Shape& shape) { pool->rename({offset, generation}, name, dtype, shape); })
      .def("is_alive", [](const BoundPool& pool, int64_t offset,
                          uint64_t generation) { return pool->is_alive({offset, generation}); })
      .def("part_of", [](const BoundPool& pool, int64_t offset) { return pool->part_of({offset, 0}); })
      .def("named", &named)
      .def("all_named", &all_named)
      .def(
          "trim", [](const BoundPool& pool) { return pool->trim(); }, Released())
      .def(
          "close", [](const BoundPool& pool) { pool->close(); }, Released())
      .def("used", [](const BoundPool& pool) { return pool->used(); })
      .def("stats", &stats)
      .def("identity",
           [](const BoundPool& pool) {
             const PoolIdentity& id = pool->identity();
             return py::bytes(reinterpret_cast<const char*>(id.data()), id.size());
           })
      .def("parts", &parts)
      .def("max_names", [](const BoundPool& pool) { return pool->max_names(); })
      .def("attachments", [](const BoundPool& pool) { return pool->attachments(); })
      .def("memory",
           [](const BoundPool& pool) { return PoolMemory{pool->memory(), pool->data_offset(), pool->bytes()}; });
}

void bind_slots(py::module_& m) {
  py::class_<SlotTable>(m, "SlotTable")
      .def(py::init<int64_t, int>())
      .def("lookup", &lookup)
      .def("insert", &insert)
      .def("check_insert", &check_insert)
      .def("evict", &evict)
      .def("pin", of_entry("SlotStore.pin", &SlotTable::pin))
      .def("unpin", of_entry("SlotStore.unpin", &SlotTable::unpin))
      .def("remove", of_entry("SlotStore.remove", &SlotTable::remove))
      .def("stats", &slot_stats);
}

}  // namespace

void bind_memory_pool(py::module_& m) {
  register_pool_errors();
  bind_pool(m);
  bind_slots(m);
}

}  // namespace sic::bind
#endif
