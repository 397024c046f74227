// From a form that matched to what it says: numbers, nouns and labels among its tokens.
#pragma once
#include "references/compiled.h"

namespace sic::references {

class Reader {
 public:
  // Ranges and labels go to `out`.
  Reader(const Sentence& sentence, References& out) : sentence_(sentence), out_(out) {}

  // What tokens [begin, end) say, which `form` matched.
  std::optional<Found> read(const CompiledForm& form, int64_t begin, int64_t end);

 private:
  struct Number {
    int64_t value;  // "last": -1
    bool ranged;    // ends a range that the one before it begins
  };

  bool is_numero(uint32_t begin) const;
  void read_numbers();
  int64_t value_of(Role role, const Token& token) const;
  int32_t noun() const;
  bool has(const ClassSet& classes) const;

  void read_list(Part& part);
  void read_from_end(const CompiledForm& form, Part& part);
  void read_first(Part& part);
  void read_last(const CompiledForm& form, Part& part);
  void read_all(const CompiledForm& form, Part& part);
  void read_labels(const ClassSet& classes, Meaning means, Part& part);
  void set_range(Part& part, Range range);
  bool is_capital(Span label) const;
  Span stripped(Span label) const;

  const Sentence& sentence_;
  References& out_;
  int64_t begin_ = 0, end_ = 0;
  std::vector<Number> numbers_;
};

}  // namespace sic::references
