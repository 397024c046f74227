// Checked memory: which addresses a kernel may touch. Everything else is a fault.
#pragma once
#include <cstddef>

#include "core/tensor_view.h"

namespace sic::simt {

enum class Access { read_only, read_write };
enum class Contents { given, garbage };  // garbage may not be read before it has been written

// Memory that kernels may touch from now on; of a tensor its elements, not the gaps between rows. Where several
// overlap, what one of them allows is allowed. The result is for withdraw(); 0: nothing to touch.
int offer(const char* name, const void* data, size_t bytes, Access access, Contents contents);
int offer(const char* name, const TensorView& tensor, Access access, Contents contents);
void withdraw(int id);
// Kernels may also write what starts here.
void allow_writes(const void* data);

// Memory on offer while this lives.
class Offered {
 public:
  explicit Offered(int id = 0) : id_(id) {}
  Offered(Offered&& other) noexcept : id_(other.id_) { other.id_ = 0; }
  Offered& operator=(Offered&& other) noexcept {
    const int id = id_;
    id_ = other.id_, other.id_ = id;
    return *this;
  }
  ~Offered() {
    if (id_) withdraw(id_);
  }

 private:
  int id_;
};

}  // namespace sic::simt
