"""A pytest plugin: takes the C extensions from the folder that the environment names."""

import importlib.util
import os
import sys
from pathlib import Path

for name in ("_native",):
    path = next(Path(os.environ["TESTED_EXTENSIONS"]).glob(f"{name}.*.so"))
    spec = importlib.util.spec_from_file_location(f"gadei_ps.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[f"gadei_ps.{name}"] = module
