"""Eight CPU devices, whatever else the machine has."""

import os

# Read when JAX first looks for devices, hence before any test runs.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
