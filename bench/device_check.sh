#!/usr/bin/env bash
# All that a machine with a GPU can prove, in one command of less than eight minutes: bench/device_check.py says what.
# PYTHON is the interpreter to use (default: python3), which has torch; nothing is installed into it.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/device_check.py" "$@"
