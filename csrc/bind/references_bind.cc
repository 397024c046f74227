// The grammar of references for Python. The emulator's module has none: nothing here runs on a device.
#if !defined(SIC_SIMT)
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/python_values.h"
#include "core/check.h"
#include "references/numbers.h"
#include "references/references.h"

namespace sic::bind {
namespace {

using namespace references;
using Number = std::optional<int64_t>;
using BoundForm = std::tuple<std::string, std::string, std::string, Number, Number, bool, bool>;
using LangAndName = std::pair<std::string, std::string>;

// The fields of Reference (sic_kernels/references/types.py), in their order: reference() below fills them.
constexpr const char* kFields[] = {"span", "kind", "ordinal", "noun", "depth", "ranges", "total", "labels", "within"};

constexpr size_t kLongText = 1 << 14;  // shorter ones take less time than giving the GIL away and getting it back

const Characters kCharacters{
    [](char32_t c) { return c == '_' || Py_UNICODE_ISALNUM(c) != 0; },
    [](char32_t c) { return Py_UNICODE_ISUPPER(c) != 0; },
    [](char32_t c) { return Py_UNICODE_ISLOWER(c) || Py_UNICODE_ISTITLE(c); },
};

// Gives the GIL up for long texts.
template <class Body>
auto unlocked(const Text& text, Body body) {
  std::optional<py::gil_scoped_release> release;
  if (text.size >= kLongText) release.emplace();
  return body();
}

py::object owned(PyObject* object) {
  if (!object) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

Text text_of(const char* op, const char* arg, py::handle object) {
  if (!PyUnicode_Check(object.ptr())) Check(op).fail(arg, type_of(object), "str");
#if PY_VERSION_HEX < 0x030C0000
  if (PyUnicode_READY(object.ptr()) != 0) throw py::error_already_set();
#endif
  return {PyUnicode_DATA(object.ptr()), static_cast<int>(PyUnicode_KIND(object.ptr())),
          static_cast<size_t>(PyUnicode_GET_LENGTH(object.ptr()))};
}

// Any characters, lone surrogates too.
std::u32string characters_of(py::handle object) {
  const Text text = text_of("ReferenceGrammar", "words", object);
  std::u32string characters;
  for (size_t i = 0; i < text.size; ++i) characters.push_back(text[i]);
  return characters;
}

template <size_t N>
int index_of(const char* arg, const char* const (&names)[N], const std::string& name) {
  for (size_t i = 0; i < N; ++i) {
    if (name == names[i]) return static_cast<int>(i);
  }
  Check("ReferenceGrammar").fail(arg, name, "one of its names");
}

template <size_t N>
py::tuple tuple_of(const char* const (&names)[N]) {
  py::tuple all(N);
  for (size_t i = 0; i < N; ++i) all[i] = py::str(names[i]);
  return all;
}

// `type`, which must be a class of tuples with the fields that reference() fills.
py::object checked_reference(const py::object& type) {
  const bool is_tuple =
      PyType_Check(type.ptr()) && PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type.ptr()), &PyTuple_Type);
  const py::tuple fields = tuple_of(kFields);
  if (!is_tuple || !py::getattr(type, "_fields", py::none()).equal(fields)) {
    Check("ReferenceGrammar")
        .fail("reference", py::repr(type), "a class of tuples with _fields = " + std::string(py::repr(fields)));
  }
  return type;
}

// A grammar, and Python's objects for what is in every reference.
class ReferenceGrammar {
 public:
  ReferenceGrammar(std::vector<std::string> classes, const py::list& words,
                   const std::vector<std::pair<py::str, bool>>& nouns, const std::vector<BoundForm>& forms,
                   const std::map<LangAndName, std::string>& rules,
                   const std::map<LangAndName, std::vector<std::string>>& sets, const py::object& reference)
      : type_(checked_reference(reference)) {
    Tables tables;
    tables.classes = std::move(classes);
    for (const auto& [noun, generic] : nouns) {
      nouns_.push_back(noun);
      tables.generic.push_back(generic);
    }
    for (const py::handle word : words) {
      const auto [text, cls, number, noun] = word.cast<std::tuple<py::object, std::string, Number, int32_t>>();
      tables.words.push_back({characters_of(text), cls, number, noun});
    }
    for (const auto& [lang, means, pattern, ordinal, count, capital, rear] : forms) {
      tables.forms.push_back({static_cast<Lang>(index_of("forms", kLangNames, lang)),
                              static_cast<Meaning>(index_of("forms", kMeanings, means)), pattern, ordinal, count,
                              capital, rear});
    }
    for (const auto& [name, pattern] : rules) {
      tables.rules[index_of("rules", kLangNames, name.first)][index_of("rules", kRules, name.second)] = pattern;
    }
    for (const auto& [name, set] : sets) {
      tables.sets[index_of("sets", kLangNames, name.first)][index_of("sets", kSets, name.second)] = set;
    }
    for (const char* kind : kKinds) kinds_.push_back(py::str(kind));
    for (const std::string& cls : tables.classes) classes_.push_back(py::str(cls));
    grammar_ = std::make_unique<Grammar>(tables, kCharacters);
  }

  // A list of references. `lang`: of Lang, or -1 for the grammars that the text can need.
  py::list parse(py::handle text, py::handle low, int lang, int depth) const {
    const Text given = text_of("parse", "text", text), lowered = text_of("parse", "text", low);
    if (lang < -1 || lang >= kLangs) Check("parse").fail("lang", std::to_string(lang), "-1, or one of the languages");
    const References found = unlocked(given, [&] {
      return grammar_->parse(given, lowered, lang < 0 ? lang_of(lowered) : static_cast<Lang>(lang), depth);
    });
    py::list result;
    py::object within = py::none();
    for (size_t i = 0; i < found.parts.size(); ++i) {
      const Part& part = found.parts[i];
      within = reference(part, found, text, part.nested ? within : py::none());
      const bool is_innermost = i + 1 == found.parts.size() || !found.parts[i + 1].nested;
      if (is_innermost) result.append(within);
    }
    return result;
  }

  // (noun or None, class, whether it is counted) of each token.
  py::list mentions(py::handle low) const {
    const Text lowered = text_of("outline", "text", low);
    py::list all;
    for (const Mention& m : unlocked(lowered, [&] { return grammar_->mentions(lowered); })) {
      all.append(py::make_tuple(noun_or_none(m.noun), classes_[m.cls], m.counted));
    }
    return all;
  }

 private:
  py::object noun_or_none(int32_t noun) const {
    return noun < 0 ? py::none() : py::object(nouns_[static_cast<size_t>(noun)]);
  }

  static py::object pair(int64_t first, int64_t second) {
    const py::object a = owned(PyLong_FromLongLong(first)), b = owned(PyLong_FromLongLong(second));
    return owned(PyTuple_Pack(2, a.ptr(), b.ptr()));
  }

  // One of type_; its fields are those of kFields.
  py::object reference(const Part& part, const References& found, py::handle text, py::handle within) const {
    const Range* ranges = found.ranges.data() + part.ranges;
    const Span* labels = found.labels.data() + part.labels;
    const py::object of_ranges = owned(PyTuple_New(part.range_count)), of_labels = owned(PyTuple_New(part.label_count));
    for (uint32_t i = 0; i < part.range_count; ++i) {
      PyTuple_SET_ITEM(of_ranges.ptr(), i, pair(ranges[i].first, ranges[i].last).release().ptr());
    }
    for (uint32_t i = 0; i < part.label_count; ++i) {
      const py::object label = owned(PyUnicode_Substring(text.ptr(), labels[i].begin, labels[i].end));
      PyTuple_SET_ITEM(of_labels.ptr(), i, label.inc_ref().ptr());
    }
    const auto number = [](Number n) { return n ? owned(PyLong_FromLongLong(*n)) : py::object(py::none()); };
    const py::object span = pair(part.span.begin, part.span.end), noun = noun_or_none(part.noun);
    const py::object ordinal = number(part.range_count ? Number(ranges[0].first) : std::nullopt);
    const py::object depth = number(part.depth), total = number(part.total);
    static_assert(std::size(kFields) == 9);
    const py::object fields =
        owned(PyTuple_Pack(9, span.ptr(), kinds_[static_cast<size_t>(part.kind)].ptr(), ordinal.ptr(), noun.ptr(),
                           depth.ptr(), of_ranges.ptr(), total.ptr(), of_labels.ptr(), within.ptr()));
    const py::object arguments = owned(PyTuple_Pack(1, fields.ptr()));
    auto* const type = reinterpret_cast<PyTypeObject*>(type_.ptr());
    return owned(PyTuple_Type.tp_new(type, arguments.ptr(), nullptr));  // as tuple.__new__ does
  }

  std::unique_ptr<const Grammar> grammar_;
  py::object type_;
  std::vector<py::str> nouns_, kinds_, classes_;
};

int64_t chinese_number(py::handle object) {
  const Text text = text_of("chinese_number", "text", object);
  if (text.size == 0) Check("chinese_number").fail("text", "nothing", "a Chinese numeral");
  for (size_t i = 0; i < text.size; ++i) {
    if (chinese_digit(text[i]) < 0) Check("chinese_number").fail("text", "another character", "a Chinese numeral");
  }
  return number_of_chinese(text, 0, text.size);
}

// The names that tables are made of, by what they name: Python has the same (sic_kernels/references/grammar.py).
py::dict reference_names() {
  using namespace py::literals;
  return py::dict("languages"_a = tuple_of(kLangNames), "meanings"_a = tuple_of(kMeanings),
                  "rules"_a = tuple_of(kRules), "sets"_a = tuple_of(kSets), "kinds"_a = tuple_of(kKinds));
}

}  // namespace

void bind_references(py::module_& m) {
  py::class_<ReferenceGrammar>(m, "ReferenceGrammar")
      .def(py::init<std::vector<std::string>, const py::list&, const std::vector<std::pair<py::str, bool>>&,
                    const std::vector<BoundForm>&, const std::map<LangAndName, std::string>&,
                    const std::map<LangAndName, std::vector<std::string>>&, const py::object&>(),
           py::arg("classes"), py::arg("words"), py::arg("nouns"), py::arg("forms"), py::arg("rules"), py::arg("sets"),
           py::arg("reference"))
      .def("parse", &ReferenceGrammar::parse)
      .def("mentions", &ReferenceGrammar::mentions);
  m.def("reference_names", &reference_names);
  m.def("reference_pattern_problem", &pattern_problem);
  m.def("chinese_number", &chinese_number);
}

}  // namespace sic::bind
#endif
