"""Adapters to model runners. Each imports its runner only when it is itself imported."""
