// What a row of a selection must contain; shared by the backends of select and by attend.
#pragma once
#include "slicing/validate.h"

namespace sic::slicing {

struct Span {
  int32_t begin, end;
};

// One row's problem, in units (tokens or pages).
struct SelectRow {
  int32_t visible = 0;    // units to choose from
  int32_t budget = 0;     // units wanted, forced ones included
  int32_t forced = 0;     // units in spans
  Span* spans = nullptr;  // forced, ascending, disjoint, not touching
  int32_t span_count = 0;
  double top_p = 1;

  int32_t count() const {
    const int32_t wanted = budget > forced ? budget : forced;
    return wanted < visible ? wanted : visible;
  }
};

// Row (b, t, h) with `tokens` visible positions; spans: room for span_room().
SelectRow select_row(const SelectArgs& a, int64_t b, int64_t h, int64_t tokens, Span* spans);
// That no row needs more slots than a.indices has, where the host can read lengths and budgets.
void check_capacity(const Check&, const SelectArgs& a);
inline int64_t span_room(const SelectArgs& a) { return 2 + (a.keep.given() ? a.keep.shape[1] : 0); }

}  // namespace sic::slicing
