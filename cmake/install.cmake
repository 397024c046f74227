# What `cmake --install` lays down.
#   component python: the module _C, at the prefix itself (the Python package)
#   component dev:    lib/libsic.a, include/sic, lib/cmake/sic_kernels, src (what add_subdirectory needs)
include(CMakePackageConfigHelpers)

set(SIC_CMAKE_DIR lib/cmake/sic_kernels)
install(TARGETS sic EXPORT sic_kernelsTargets ARCHIVE DESTINATION lib COMPONENT dev LIBRARY DESTINATION lib COMPONENT dev)
install(EXPORT sic_kernelsTargets NAMESPACE sic:: DESTINATION ${SIC_CMAKE_DIR} COMPONENT dev)
install(
  DIRECTORY csrc/core csrc/slicing csrc/delta csrc/head csrc/ragged csrc/replay csrc/references
  DESTINATION include/sic
  COMPONENT dev
  FILES_MATCHING
  PATTERN "*.h"
  PATTERN "*.cuh")

configure_package_config_file(cmake/sic_kernelsConfig.cmake.in ${PROJECT_BINARY_DIR}/sic_kernelsConfig.cmake
                              INSTALL_DESTINATION ${SIC_CMAKE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/sic_kernelsConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/sic_kernelsConfig.cmake ${PROJECT_BINARY_DIR}/sic_kernelsConfigVersion.cmake
        DESTINATION ${SIC_CMAKE_DIR} COMPONENT dev)

install(FILES CMakeLists.txt LICENSE DESTINATION src COMPONENT dev)
install(DIRECTORY cmake DESTINATION src COMPONENT dev)
install(DIRECTORY csrc DESTINATION src COMPONENT dev PATTERN "bind" EXCLUDE)

if(SIC_PYTHON)
  install(TARGETS _C LIBRARY DESTINATION . COMPONENT python)
endif()
