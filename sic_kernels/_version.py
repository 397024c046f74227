"""The one version of the Python package and the C++ core (a test compares it with CMakeLists.txt)."""

__version__ = "0.1.0"
