"""Eight CPU devices for the tests of this folder, and quick compiles as in `tests/conftest.py`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    + os.environ.get("XLA_FLAGS", "")
)
