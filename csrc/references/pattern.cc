#include "references/pattern.h"

#include <tuple>
#include <utility>

#include "references/pattern_syntax.h"

namespace sic::references {
namespace {

constexpr size_t kLongest = 1 << 20;  // instructions
constexpr size_t kLongestShown = 80;  // characters of a pattern in a message

// Writes instructions from the last to the first, so that each knows where it goes on.
//
// In a repeat, what follows an iteration depends on whether it took anything. No count of tokens is kept for that: what
// follows is a pair, and a token taken is what leads from one side to the other.
class Emitter {
 public:
  Emitter(std::string_view text, std::vector<Pattern::Instruction>& code, std::vector<ClassSet>& sets)
      : text_(text), code_(code), sets_(sets) {}

  struct Next {
    uint32_t still, moved;  // if nothing was taken since the innermost iteration began, and if something was
    bool same() const { return still == moved; }
  };

  uint32_t program(const Node& node) {
    const uint32_t accept = add({Pattern::Instruction::accept});
    return emit(node, {accept, accept});
  }

 private:
  uint32_t add(const Pattern::Instruction& instruction) {
    if (code_.size() == kLongest) throw PatternError(text_, "too many repeats");
    code_.push_back(instruction);
    return static_cast<uint32_t>(code_.size() - 1);
  }

  uint32_t emit(const Node& node, Next next) {
    const auto key = std::make_tuple(&node, next.still, next.moved);
    if (const auto found = known_.find(key); found != known_.end()) return found->second;
    const uint32_t entry = emit_new(node, next);
    known_[key] = entry;
    return entry;
  }

  uint32_t emit_new(const Node& node, Next next) {
    switch (node.kind) {
      case Node::classes:
        return emit_take(node, next);
      case Node::sequence:
        return emit_sequence(node, next);
      case Node::choice:
        return emit_choice(node, next);
      case Node::repeat:
        return emit_repeat(node, next);
      case Node::look:
        return emit_look(node, next);
      case Node::end:
        return add({Pattern::Instruction::end, false, 0, next.still});
    }
    return 0;
  }

  uint32_t emit_take(const Node& node, Next next) {
    uint32_t set = 0;
    while (set < sets_.size() && sets_[set] != node.set) ++set;
    if (set == sets_.size()) sets_.push_back(node.set);
    return add({Pattern::Instruction::take, false, 0, next.moved, set});
  }

  uint32_t emit_sequence(const Node& node, Next next) {
    for (auto part = node.parts.rbegin(); part != node.parts.rend(); ++part) {
      const uint32_t moved = emit(*part, {next.moved, next.moved});
      next = {next.same() ? moved : emit(*part, next), moved};
    }
    return next.still;
  }

  uint32_t split(uint32_t first, uint32_t second) {
    return add({Pattern::Instruction::split, false, 0, first, second});
  }

  uint32_t emit_choice(const Node& node, Next next) {
    uint32_t entry = emit(node.parts.back(), next);
    for (auto part = node.parts.rbegin() + 1; part != node.parts.rend(); ++part) {
      entry = split(emit(*part, next), entry);
    }
    return entry;
  }

  // Iteration c goes on with iteration c + 1; one that took nothing, once there are enough of them, with what is
  // behind.
  uint32_t emit_repeat(const Node& node, Next next) {
    Next after = next;  // the iterations behind this one
    for (int c = node.most - 1; c >= 0; --c) {
      const uint32_t moved = iteration(node, c, {after.moved, after.moved}, next.moved);
      after = {next.same() ? moved : iteration(node, c, after, next.still), moved};
    }
    return after.still;
  }

  uint32_t iteration(const Node& node, int c, Next after, uint32_t behind) {
    const Node& body = node.parts[0];
    const bool enough = c >= node.least;
    if (enough) after.still = behind;
    if (body.narrowest > 0) after.still = after.moved;  // always takes something
    const uint32_t entry = emit(body, after);
    if (!enough) return entry;
    return node.lazy ? split(behind, entry) : split(entry, behind);
  }

  // Its own program is shared with no other: see Matcher.
  uint32_t emit_look(const Node& node, Next next) {
    const Node& body = node.parts[0];
    const uint32_t entry = program(body);
    const auto behind = static_cast<uint16_t>(node.behind ? body.widest : 0);
    return add({Pattern::Instruction::look, node.negated, behind, next.still, entry});
  }

  std::string_view text_;
  std::vector<Pattern::Instruction>& code_;
  std::vector<ClassSet>& sets_;
  std::map<std::tuple<const Node*, uint32_t, uint32_t>, uint32_t> known_;
};

}  // namespace

PatternError::PatternError(std::string_view pattern, const std::string& problem)
    : ArgumentError("Grammar: pattern: got " + std::string(pattern.substr(0, kLongestShown)) +
                    ", expected a pattern (" + problem + ")"),
      problem_(problem) {}

Pattern::Pattern(std::string_view text, const Classes& classes) {
  const Node tree = parse_pattern(text, classes);
  entry_ = Emitter(text, code_, sets_).program(tree);
  // What an instruction goes on with lies before it, so one pass knows all.
  const ClassSet none, all = ~none;
  std::vector<ClassSet> main(code_.size()), ahead(code_.size());  // a program that ends takes nothing; a look may
  for (size_t i = 0; i < code_.size(); ++i) {
    const Instruction& in = code_[i];
    for (auto* first : {&main, &ahead}) {
      ClassSet& set = (*first)[i];
      switch (in.op) {
        case Instruction::take:
          set = sets_[in.other];
          break;
        case Instruction::split:
          set = (*first)[in.next] | (*first)[in.other];
          break;
        case Instruction::end:
          set = (*first)[in.next];
          break;
        case Instruction::accept:
          set = first == &main ? none : all;
          break;
        case Instruction::look:
          set = (*first)[in.next];
          if (!in.negated && !in.behind) set &= ahead[in.other];
      }
    }
  }
  first_ = main[entry_];
}

}  // namespace sic::references
