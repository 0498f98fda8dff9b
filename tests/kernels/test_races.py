"""The check for races that all tests of kernels make."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from mxjax.kernels.implementation import interpreted


def test_a_race_is_found(capsys):
    """Shared memory overwritten while it is copied out."""

    def racing_kernel(x_gmem, out_gmem, smem):
        smem[...] = x_gmem[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_gmem)
        smem[...] = 2 * x_gmem[...]
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        racing_kernel,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=(plgpu.SMEM((128,), jnp.float32),),
        grid=(1,),
        grid_names=("block",),
    )
    said = ""
    try:
        with interpreted():
            jax.block_until_ready(jax.jit(kernel)(jnp.ones(128)))
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError as error:  # since JAX 0.12; before, it only prints
        said = str(error)
    assert "RACE DETECTED" in said + capsys.readouterr().out
