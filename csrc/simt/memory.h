// Checked memory: which addresses a kernel may touch. Everything else is a fault.
#pragma once
#include <cstddef>

#include "core/tensor_view.h"

namespace sic::simt {

enum class Access { read_only, read_write };
enum class Contents { given, garbage };  // garbage may not be read before it is written

// Memory that kernels may touch from now on. Several may overlap: what one of them allows is allowed.
// The name must stay valid. The result is for withdraw().
int offer(const char* name, const void* data, size_t bytes, Access access, Contents contents);
// The elements of a tensor; not the gaps between its rows.
int offer(const char* name, const TensorView& tensor, Access access, Contents contents);
void withdraw(int id);
// Kernels may also write what starts here.
void allow_writes(const void* data);

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
