"""Print the requirements of the named extras of pyproject.toml, one a line: python tools/extras.py demo test."""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
for extra in sys.argv[1:]:
    print("\n".join(r.replace(" ", "") for r in project["optional-dependencies"][extra]))
