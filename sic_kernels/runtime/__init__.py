"""What every family stands on: arrays, backends, checks, config, errors, log, metrics, trace, probe.

Nothing is imported here, so that one module can be used without the others (and without torch).
"""
