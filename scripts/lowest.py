"""Print the lowest version of each dependency and extra that pyproject.toml allows, as pip takes them."""

import re
from pathlib import Path

from packaging.requirements import Requirement

text = Path(__file__).parent.parent.joinpath("pyproject.toml").read_text()
(required,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
(extras,) = re.findall(r"^\[project.optional-dependencies\]\n(.*?)^$", text, re.DOTALL | re.MULTILINE)
for line in re.findall(r'"([^"]+)"', required + extras):
    requirement = Requirement(line)
    (lowest,) = [part.version for part in requirement.specifier if part.operator == ">="]
    print(f"{requirement.name}=={lowest}")
