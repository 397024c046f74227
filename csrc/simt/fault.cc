// Faults: where they happened, in words.
#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <unordered_map>

#include "core/check.h"
#include "simt/checker.h"
#include "simt/cuda_state.h"

namespace sic::simt {
namespace {

Place fault_place, fault_other;
const Thread* fault_thread = nullptr;

std::string run(const char* command) {
  std::string text;
  if (FILE* pipe = popen(command, "r")) {
    char part[512];
    while (size_t n = std::fread(part, 1, sizeof part, pipe)) text.append(part, n);
    pclose(pipe);
  }
  return text;
}

// What addr2line says of an address in a loaded file, the name of its function first; empty without that tool or
// without debug information. It takes a while, so answers are kept.
const std::string& symbolise(const void* address) {
  static std::unordered_map<const void*, std::string> known;
  const auto [entry, fresh] = known.try_emplace(address);
  Dl_info info;
  if (!fresh || !dladdr(address, &info) || !info.dli_fname) return entry->second;
  char command[4096];
  std::snprintf(command, sizeof command, "addr2line -f -i -C -e '%s' %#zx 2>/dev/null", info.dli_fname,
                reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(info.dli_fbase));
  std::string text = run(command);
  if (text.find("??") == std::string::npos) entry->second = std::move(text);
  return entry->second;
}

std::string from_source_root(const std::string& path) {
  const size_t root = path.rfind("/csrc");
  return root == std::string::npos ? path : path.substr(root + 1);
}

// "a.cuh:12 in b.cu:40": the line, and the lines that it was inlined into; without the emulator's own. Names and lines
// alternate.
std::string lines_of(const void* pc) {
  std::istringstream text(symbolise(static_cast<const char*>(pc) - 1));
  std::string result, name, line;
  while (std::getline(text, name) && std::getline(text, line)) {
    if (line.find("/csrc/simt/") != std::string::npos) continue;
    line.erase(std::min(line.find(" (discriminator"), line.size()));
    result += (result.empty() ? "" : " in ") + from_source_root(line);
  }
  return result;
}

void erase_all(std::string& text, const char* part) {
  for (size_t at; (at = text.find(part)) != std::string::npos;) text.erase(at, std::strlen(part));
}

std::string kernel_name(const void* entry) {
  std::string text = symbolise(entry);
  text.erase(std::min(text.find('\n'), text.size()));
  erase_all(text, "(anonymous namespace)::");
  erase_all(text, "sic::gpu::");
  erase_all(text, "sic::");
  text.erase(std::min(text.find('('), text.size()));
  if (text.rfind("void ", 0) == 0) text.erase(0, 5);
  return text.empty() ? "kernel" : text;
}

std::string describe(const Place& place) {
  const std::string lines = place.pc ? lines_of(place.pc) : std::string();
  if (!lines.empty() || !place.site.file) return lines;
  return from_source_root(place.site.file) + ":" + std::to_string(place.site.line);
}

std::string index_text(const char* what, uint3 i) {
  char text[64];
  std::snprintf(text, sizeof text, "%s (%u,%u,%u)", what, i.x, i.y, i.z);
  return text;
}

void keep(const Place& place, const Place& other, const char* format, va_list arguments) {
  if (!engine.error.empty()) return;
  char text[512];
  std::vsnprintf(text, sizeof text, format, arguments);
  engine.error = text;
  fault_place = place, fault_other = other;
  fault_thread = engine.current;
}

void fault_at(const Place& place, const Place& other, const char* format, va_list arguments) {
  if (!in_kernel()) {
    const Lock hold;  // others may be running a kernel
    return keep(place, other, format, arguments);
  }
  keep(place, other, format, arguments);
  stop_kernel();
}

}  // namespace

void fault(const Place& place, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fault_at(place, {}, format, arguments);
  va_end(arguments);
}

void fault_between(const Place& place, const Place& other, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fault_at(place, other, format, arguments);
  va_end(arguments);
}

void throw_fault() {
  const bool of_kernel = engine.call.entry;
  std::string message = (of_kernel ? kernel_name(engine.call.entry) : "host code") + ": " + engine.error;
  const std::string where = describe(fault_place), other = describe(fault_other);
  if (!where.empty()) message += ", at " + where;
  if (!other.empty() && other != where) message += " and " + other;
  if (of_kernel)
    message += " [" + index_text("block", fault_thread ? block_of(*fault_thread).index : engine.blocks[0].index);
  if (of_kernel && fault_thread) message += index_text(", thread", fault_thread->index);
  if (of_kernel) message += "]";
  engine.error.clear();
  engine.call = {};
  record(cudaErrorIllegalAddress);
  throw Fault(message);
}

std::string launch_error(const void* entry, const char* why) { return kernel_name(entry) + ": " + why; }

}  // namespace sic::simt
