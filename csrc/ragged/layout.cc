#include "ragged/layout.h"

#include <string>

namespace sic::ragged {
namespace {

constexpr int64_t kMaxRowBytes = int64_t{1} << 31;

std::string row_shape(const TensorView& v, int lead) {
  std::string text = "[";
  for (int i = lead; i < v.rank; ++i) text += (i > lead ? "," : "") + std::to_string(v.shape[i]);
  return text + "]";
}

bool same_row_shape(const TensorView& a, int a_lead, const TensorView& b, int b_lead) {
  if (a.rank - a_lead != b.rank - b_lead) return false;
  for (int i = a_lead; i < a.rank; ++i)
    if (a.shape[i] != b.shape[i - a_lead + b_lead]) return false;
  return true;
}

TensorView as_rows(const TensorView& v, int lead) {
  TensorView rows = v;
  rows.rank = lead + 1;
  rows.shape[lead] = rows.stride[lead] = 1;
  for (int i = lead; i < v.rank; ++i) rows.shape[lead] *= v.shape[i];
  return rows;
}

}  // namespace

TensorView check_rows(const Check& check, const char* arg, const TensorView& v, int lead) {
  if (!v.given() || v.rank < lead || !kMovable.contains(v.dtype))
    check.fail(arg, describe(v), describe(kMovable) + " of rank " + std::to_string(lead) + " or more");
  int64_t size = 1;
  for (int i = v.rank - 1; i >= lead && v.size() > 0; size *= v.shape[i--])
    if (v.shape[i] != 1 && v.stride[i] != size)
      check.fail(arg, describe(v) + " with gaps in its rows",
                 "rows " + row_shape(v, lead) + " whose elements are contiguous");
  const TensorView rows = as_rows(v, lead);
  check.tensor(arg, rows, kMovable, lead + 1);
  const int64_t bytes = rows.shape[lead] * itemsize(v.dtype);
  check.value(bytes < kMaxRowBytes, arg, static_cast<double>(bytes), "rows of less than 2^31 bytes");
  return rows;
}

void check_output_rows(const Check& check, const TensorView& out, std::initializer_list<int64_t> leading,
                       const TensorView& like, int like_lead) {
  const int lead = static_cast<int>(leading.size());
  const TensorView rows = check_rows(check, "out", out, lead);
  if (out.dtype != like.dtype || !same_row_shape(out, lead, like, like_lead))
    check.fail("out", describe(out), std::string(name(like.dtype)) + " with rows " + row_shape(like, like_lead));
  int i = 0;
  for (const int64_t n : leading) {
    if (n >= 0 && out.shape[i] != n)
      check.fail("out", describe(out), std::to_string(n) + " in dimension " + std::to_string(i));
    ++i;
  }
  // What is left to look at: distinct elements.
  if (lead == 1) return check.output("out", rows, out.dtype, {-1, -1});
  check.output("out", rows, out.dtype, {-1, -1, -1});
}

void check_lengths(const Check& check, const TensorView& cu_seqlens, int64_t sequences, int64_t longest) {
  check.tensor("cu_seqlens", cu_seqlens, kIndexInts, 1);
  const int64_t bounds = cu_seqlens.shape[0];
  if (bounds < 1 || (sequences >= 0 && bounds != sequences + 1))
    check.fail("cu_seqlens", describe(cu_seqlens),
               sequences < 0 ? "one more than there are sequences" : std::to_string(sequences + 1) + " bounds");
  const TensorView host = check.host(cu_seqlens);
  if (!host.given()) return;
  const auto at = [&](int64_t i) { return index_at(host, i * host.stride[0]); };
  const auto place = [&](int64_t i) { return std::to_string(at(i)) + " at [" + std::to_string(i) + "]"; };
  if (at(0) != 0) check.fail("cu_seqlens", place(0), "0 first");
  for (int64_t i = 1; i < bounds; ++i)
    if (at(i) < at(i - 1) || at(i) - at(i - 1) > longest)
      check.fail("cu_seqlens", place(i) + " after " + place(i - 1), "steps of 0 to " + std::to_string(longest));
}

void check_packed_rows(const Check& check, const char* arg, const TensorView& packed, const TensorView& cu_seqlens) {
  const TensorView host = check.host(cu_seqlens);
  if (!host.given()) return;
  const int64_t needed = index_at(host, (host.shape[0] - 1) * host.stride[0]);
  if (packed.shape[0] < needed)
    check.fail(arg, describe(packed), std::to_string(needed) + " rows or more, with which cu_seqlens ends");
}

Layout layout_of(const TensorView& padded, const TensorView& packed) {
  const TensorView wide = as_rows(padded, 2), tight = as_rows(packed, 1);
  Layout l;
  l.padded = wide.as<char>(), l.packed = tight.as<char>();
  l.sequences = wide.shape[0], l.longest = wide.shape[1], l.rows = tight.shape[0];
  l.row_bytes = wide.shape[2] * itemsize(wide.dtype);
  l.sequence_stride = wide.stride_bytes(0), l.row_stride = wide.stride_bytes(1);
  l.packed_stride = tight.stride_bytes(0);
  // The stride of a single row or sequence says nothing.
  if (l.longest <= 1) l.row_stride = l.row_bytes;
  if (l.rows <= 1) l.packed_stride = l.row_bytes;
  if (l.sequences <= 1) l.sequence_stride = l.longest * l.row_stride;
  return l;
}

}  // namespace sic::ragged
