"""Types of arguments that several commands take."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

Root = Annotated[Path, Parameter(help="Folder of run directories.")]
Overrides = Annotated[str, Parameter(help="section.key=value changes one value of the configuration.")]
Positive = Annotated[int, Parameter(validator=validators.Number(gte=1))]
