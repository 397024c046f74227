# The CUDA kernels for the emulator in csrc/simt: tests run them on any machine, without a GPU and without CUDA.
option(SIC_SIMT "Build the CUDA kernels for the emulator: the Python module _simt, and its C++ tests" OFF)

if(SIC_SIMT AND NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  message(FATAL_ERROR "sic_kernels: SIC_SIMT needs g++ (its checks are calls that g++ -fsanitize=thread inserts)")
endif()
if(SIC_SIMT)
  # A directory of its own: here .cu files are C++, elsewhere they may be nvcc's.
  add_subdirectory(csrc/simt)
endif()
