"""Eight CPU devices and quick compiles for all tests, those of `examples/` too.

For the tests that need GPUs: `JAX_PLATFORMS=cuda pytest -m gpu`.
"""

import gc
import os

# Tracing makes many objects and hardly any cycles; by default a tenth of the time would go into
# looking for them.
gc.set_threshold(50_000, 20, 20)

# Before JAX is imported. Nearly all of the suite's time is compiling; without LLVM's optimisations,
# in one piece, and with XLA's older code generator for fused operations that takes a fifth of the
# time.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    + os.environ.get("XLA_FLAGS", "")
)
