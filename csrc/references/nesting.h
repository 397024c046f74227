// Neighbours that are parts of one another: "the second example in the third point".
#pragma once
#include <vector>

#include "references/compiled.h"

namespace sic::references {

// Takes what was found from left to right and adds the references that it makes to `out`.
class Nesting {
 public:
  Nesting(const Sentence& sentence, Matcher& matcher, int depth, References& out)
      : sentence_(sentence), matcher_(matcher), depth_(depth), out_(out) {}

  void add(const Found& found);
  void finish();  // no more are found

 private:
  enum class Order { apart, inner_first, outer_first };

  Order order_of(const Found& left, const Found& right);
  bool is_fronted(const Found& left, const Window& gap);
  bool is_all(Lang lang, Rule rule, const Window& window);
  bool is_made_vague(const Found& first, const Found& last);
  Window stretched(int64_t begin, int64_t end, Lang lang) const;
  void add_one(Span span, Kind kind);
  void add_chain(Span span);

  const Sentence& sentence_;
  Matcher& matcher_;
  const int depth_;
  References& out_;
  std::vector<Found> chain_;   // each nested with the next
  std::vector<Order> orders_;  // and how
};

}  // namespace sic::references
