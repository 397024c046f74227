// What an append must know of its slots before the rows are written.
#pragma once
#include <vector>

#include "slicing/slicing.h"

namespace sic::slicing {

struct AppendPlan {
  bool distinct = true;             // no two rows for one slot
  std::vector<int64_t> last_slots;  // of every page written, ascending
};
AppendPlan plan_append(const AppendKvArgs&);

}  // namespace sic::slicing
