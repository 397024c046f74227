// What the tests of the emulator share.
#pragma once
#include <gtest/gtest.h>

#include <string>
#include <type_traits>

#include "core/gpu.cuh"
#include "simt/testing.h"

namespace sic::simt {

template <class Body>
void in_every_schedule(Body body) {
  constexpr const char* kNames[] = {"forward", "reverse", "random"};
  for (Schedule s : {Schedule::forward, Schedule::reverse, Schedule::random})
    for (uint32_t seed = 1; seed <= (s == Schedule::random ? 3 : 1); ++seed) {
      SCOPED_TRACE(std::string(kNames[static_cast<int>(s)]) + ", seed " + std::to_string(seed));
      set_schedule(s, seed);
      body();
    }
  set_schedule(Schedule::forward);
}

// The message of the fault, or an empty string.
template <class Body>
std::string fault_of(Body body) {
  try {
    body();
  } catch (const Error& e) {
    return e.what();
  }
  return {};
}

// body(std::true_type) has a fault whose message contains `text`, body(std::false_type) has none; in every schedule.
template <class Body>
void expect_planted(const char* text, Body body) {
  in_every_schedule([&] {
    const std::string message = fault_of([&] { body(std::true_type{}); });
    EXPECT_NE(message.find(text), std::string::npos) << "expected \"" << text << "\", got \"" << message << '"';
    EXPECT_EQ(fault_of([&] { body(std::false_type{}); }), "");
  });
}

template <class T>
Buffer<T> output(size_t count, const char* name = "out") {
  return Buffer<T>(count, name, Access::read_write, Contents::garbage);
}
template <class T>
Buffer<T> input(size_t count, const char* name = "in") {
  Buffer<T> buffer(count, name, Access::read_only);
  for (size_t i = 0; i < count; ++i) buffer[i] = static_cast<T>(i);
  return buffer;
}

}  // namespace sic::simt
