"""What the kits need to be imported without a GPU."""

from __future__ import annotations

import importlib.util
import os
import sys
import types

# They read a digit of it for a port; no machine here has a tenth GPU.
os.environ["CUDA_VISIBLE_DEVICES"] = "9"

# A data set library, for tests of whole models that these are not.
if importlib.util.find_spec("datasets") is None:
    sys.modules["datasets"] = types.ModuleType("datasets")
    sys.modules["datasets"].load_dataset = None
