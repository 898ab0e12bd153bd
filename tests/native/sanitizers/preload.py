"""A pytest plugin: takes the C extension from the path that the environment names."""

import importlib.util
import os
import sys

spec = importlib.util.spec_from_file_location("gadei_ps._native", os.environ["TESTED_NATIVE"])
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.modules["gadei_ps._native"] = module
