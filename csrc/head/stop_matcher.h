// Stop strings in text that comes in pieces: an Aho-Corasick automaton over bytes, one state for each row.
//
// A state is the longest end of the text that begins a stop, so what must be held back is the state's own text: nothing
// is buffered, and a row is four numbers. States are numbered breadth first. The children of a state then have
// consecutive numbers, ascending by byte, and an edge is the one byte by which a state is entered: 21 bytes a state.
//
// Rows are independent, but calls are not synchronised: one caller at a time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sic::head {

class StopMatcher {
 public:
  struct Options {
    int64_t rows = 1;
    bool include = false;  // the stop belongs to the output; then nothing is ever held back
  };

  // Bytes that may be emitted, in order; `held` lives as long as the matcher.
  struct Safe {
    std::string_view held, chunk;
    size_t size() const { return held.size() + chunk.size(); }
  };

  // ArgumentError for an empty stop or fewer than one row. Stops may repeat.
  StopMatcher(std::vector<std::string> stops, const Options& options);

  // The next bytes of a row. The stop that ends first wins, of those that end together the longest; from then on the
  // row is matched and emits nothing.
  Safe feed(int64_t row, std::string_view chunk);
  // What is held back, now that the text has ended; the row goes on as if a new text began.
  std::string_view finish(int64_t row);

  bool matched(int64_t row) const { return at(row).matched; }
  // Bytes at the end of the text that do not belong to the output; 0 while no stop was seen.
  int64_t trim(int64_t row) const { return at(row).matched ? at(row).fed - at(row).output : 0; }

  void reset(int64_t row) { at(row) = {}; }
  // The rows become copies of those named, which may repeat, be left out, and change in number.
  void reorder(const std::vector<int64_t>& rows);

  int64_t rows() const { return static_cast<int64_t>(rows_.size()); }
  int64_t nbytes() const;

 private:
  using State = uint32_t;

  struct Row {
    State state = 0;
    bool matched = false;
    int64_t fed = 0, output = 0;  // bytes of text; of them, up to the match, output
  };

  Row& at(int64_t row) { return rows_[static_cast<size_t>(row)]; }
  const Row& at(int64_t row) const { return rows_[static_cast<size_t>(row)]; }
  void add_children(State parent, uint32_t begin, uint32_t end, std::vector<uint32_t>& last_stop);
  State child(State state, uint8_t byte) const;
  State next(State state, uint8_t byte) const;
  std::string_view held(State state) const;

  std::vector<std::string> stops_;  // ascending, each once
  bool include_;
  State root_[256] = {};  // where text that begins no stop goes on
  // By state. The children of s are first_child_[s] to first_child_[s + 1].
  std::vector<State> first_child_, fail_;  // fail: the state of the longest proper end that begins a stop
  std::vector<uint32_t> depth_, longest_;  // bytes of its text; of the longest stop at its end, 0: none
  std::vector<uint32_t> stop_;             // one that begins with its text
  std::vector<uint8_t> byte_;
  std::vector<Row> rows_;
};

}  // namespace sic::head
