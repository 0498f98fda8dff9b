"""The compiled programs of a run: training step and evaluation, one per capacity bucket."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from mxjax.config.schema import Config
from mxjax.data.mtp import mtp_names
from mxjax.models.parts import Params
from mxjax.remat.layers import offloads_activations
from mxjax.sharding.context_parallel import sequence_order
from mxjax.training.gradients import BATCH_SPEC, REPLICATED, Objective
from mxjax.training.layer_order import LayerOrder
from mxjax.training.optimizer import build_optimizer
from mxjax.training.pipelined import build_objective
from mxjax.training.state import TrainState, initial_state, state_shardings
from mxjax.training.step import StepResult, build_step, build_update, step_key, with_copies

DETERMINISTIC_GPU_OPTIONS = {"xla_gpu_deterministic_ops": True}
"""No atomics in scatter or reduction, and no choice of kernel by stopwatch."""

OFFLOADING_GPU_OPTIONS = {
    "xla_gpu_enable_command_buffer": "",
    "xla_disable_hlo_passes": "dynamic-slice-copy-fusion-async-wrapper",
}
"""What lets transfers to and from the host run beside kernels. No CUDA graphs: in a graph all runs
one after the other. And no copies of weights on streams of their own: XLA has four streams, and a
layer whose weights are behind a transfer waits for it."""

GPUS_OF_A_HOST = 8
"""A run on so many may be one process."""


class Programs:
    """Builds programs for one configuration and mesh, ahead of time where asked."""

    def __init__(self, config: Config, mesh: Mesh):
        self.config = config
        self.mesh = mesh
        self.stagewise = runs_stagewise(config, mesh)
        """Whether a step is many programs."""
        self.waits = self.stagewise and jax.default_backend() == "cpu"
        """Whether a step has ended when it is sent off, see `Stagewise`."""
        self.objective = build_objective(config, mesh)
        parts = self.objective.model.parts
        self.optimizer: optax.GradientTransformation = build_optimizer(
            config.optimizer,
            self.objective.model.infos,
            {name: part.filled for name, part in parts.items()},
        )
        self.batch_sharding = NamedSharding(mesh, BATCH_SPEC)
        self.sequence_order = sequence_order(config.training.seq_length, config.parallel.cp)
        """Which token of a sequence stands where in a batch: batches are put into this order."""
        self.replicated = NamedSharding(mesh, REPLICATED)
        abstract = jax.eval_shape(self._initial_state, jax.random.key(0))
        self.shardings: TrainState = state_shardings(self.objective, abstract)
        self.abstract_state: TrainState = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            abstract,
            self.shardings,
        )
        self.layer_order = LayerOrder(self.objective, self.abstract_state)
        """To and from the form of the state that checkpoints have."""
        self._copies = Copies(self.objective, self.abstract_state)
        self._compiled: dict[tuple[str, float], Future] = {}
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")

    def _initial_state(self, key: jax.Array) -> TrainState:
        return initial_state(self.objective, self.optimizer, self.config.training.param_dtype, key)

    def create_state(self) -> TrainState:
        """Fresh state from the run's seed, created where it belongs; the same on any mesh."""
        create = jax.jit(self._initial_state, out_shardings=self.shardings)
        return create(jax.random.key(self.config.training.seed))

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of one global batch, [microbatches, sequences, tokens]."""
        training = self.config.training
        rows = training.global_batch_size // training.num_microbatches
        shape = (training.num_microbatches, rows, training.seq_length)
        array = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding)
        tokens_ahead, targets_ahead = mtp_names(self.config.model.mtp_num_layers)
        names = ("tokens", "targets", "segment_ids", "positions", *tokens_ahead, *targets_ahead)
        return dict.fromkeys(names, array)

    def prepare(self, capacity_factor: float | None) -> None:
        """Start compiling the training step of a bucket in the background; None: nothing."""
        if capacity_factor is not None:
            self._submit("step", capacity_factor, self._compile_step)

    def step(self, capacity_factor: float) -> Callable:
        """(state, batch) -> (state, StepResult); the state's buffers are given up."""
        program = self.step_program(capacity_factor)

        def step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, StepResult]:
            state, result, copies = program(state, batch, self._copies.of(state))
            self._copies.keep(state, copies)
            return state, result

        return step

    def step_program(self, capacity_factor: float) -> Any:
        """What `step` calls, see `build_step`; a compiled program, unless the step has many."""
        return self._submit("step", capacity_factor, self._compile_step).result()

    def evaluation(self, capacity_factor: float) -> Callable:
        """(params, expert_bias, batch, key) -> see `Objective.evaluate`."""
        return self._submit("evaluation", capacity_factor, self._compile_evaluation).result()

    def close(self) -> None:
        """Forget programs that are not needed any more; a compile under way ends first."""
        self._compiler.shutdown(cancel_futures=True)

    def _submit(self, kind: str, capacity_factor: float, compile_: Callable) -> Future:
        key = (kind, capacity_factor)
        if key not in self._compiled:
            # The compiler's thread sees what the caller's context says of how to trace.
            run = contextvars.copy_context().run
            self._compiled[key] = self._compiler.submit(run, compile_, capacity_factor)
        return self._compiled[key]

    def _objective(self, capacity_factor: float) -> Objective:
        return build_objective(self.config, self.mesh, capacity_factor)

    def _stagewise_step(self, capacity_factor: float) -> Callable:
        """A step whose programs are compiled as they are first needed."""
        gradients = self._objective(capacity_factor).stagewise(self._compiler_options())
        update = build_update(self.config, self.optimizer, capacity_factor)

        # The old copies are there to give their memory to the new ones.
        @partial(
            jax.jit,
            out_shardings=self._step_shardings,
            donate_argnums=(0, 3),
            keep_unused=True,
            compiler_options=self._compiler_options(),
        )
        def finish(state, grads, stats, copies):
            state, result = update(state, grads, stats)
            return state, result, self.objective.copies(state.params)

        key_of = jax.jit(partial(step_key, self.config.training.seed))

        def step(state: TrainState, batch: dict[str, jax.Array], copies: Params):
            weights = with_copies(state.params, copies)
            key = key_of(state.step)
            return finish(state, *gradients(weights, state.expert_bias, batch, key), copies)

        return step

    @property
    def _step_shardings(self) -> tuple:
        return self.shardings, self.replicated, self._copies.shardings

    def _compile_step(self, capacity_factor: float) -> Any:
        if self.stagewise:
            return self._stagewise_step(capacity_factor)
        step = build_step(
            self.config, self._objective(capacity_factor), self.optimizer, capacity_factor
        )
        jitted = jax.jit(step, out_shardings=self._step_shardings, donate_argnums=(0, 2))
        lowered = jitted.lower(self.abstract_state, self.abstract_batch(), self._copies.abstract)
        return self._compile(lowered)

    def _compile_evaluation(self, capacity_factor: float) -> Any:
        evaluate = jax.jit(self._objective(capacity_factor).evaluate())
        state = self.abstract_state
        key = jax.eval_shape(lambda: jax.random.key(0))
        lowered = evaluate.lower(state.params, state.expert_bias, self.abstract_batch(), key)
        return self._compile(lowered)

    def _compile(self, lowered: Any) -> Any:
        return lowered.compile(compiler_options=self._compiler_options())

    def _compiler_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        # Without a GPU, for a plan, XLA finds no kernel that it is sure of.
        if self.config.training.deterministic and jax.default_backend() == "gpu":
            options |= DETERMINISTIC_GPU_OPTIONS
        offloads = offloads_activations(self.config) or self.config.optimizer.offload
        if offloads and self.mesh.devices.flat[0].platform != "cpu":
            options |= OFFLOADING_GPU_OPTIONS
        return options


def runs_stagewise(config: Config, mesh: Mesh | AbstractMesh) -> bool:
    """See `PipelineConfig.executor`. On devices that are not here, `auto` is taken for one process
    per host."""
    if config.parallel.pp == 1 or config.pipeline.executor != "auto":
        return config.parallel.pp > 1 and config.pipeline.executor == "stagewise"
    if isinstance(mesh, Mesh) and mesh.devices.flat[0] in jax.devices():
        return jax.process_count() == 1
    return mesh.size <= GPUS_OF_A_HOST


class Copies:
    """`Objective.copies`, from step to step. They are no part of the state, which they follow from:
    they are made anew for a state that no step of this run has returned.

    Attributes:
      abstract, shardings: of all leaves.
    """

    def __init__(self, objective: Objective, abstract_state: TrainState):
        def placed(leaf, copy):
            if copy is None:
                return None
            return jax.ShapeDtypeStruct(copy.shape, copy.dtype, sharding=leaf.sharding)

        params = abstract_state.params
        shapes = jax.eval_shape(objective.copies, params)
        self.abstract: Params = jax.tree.map(placed, params, shapes)
        self.shardings: Params = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        self._make = jax.jit(objective.copies, out_shardings=self.shardings)
        self._kept: Params | None = None
        self._kept_for: Callable[[], TrainState | None] = lambda: None

    def of(self, state: TrainState) -> Params:
        """Those of this state; the caller's, who may give up their buffers."""
        kept, self._kept = self._kept, None
        if kept is not None and self._kept_for() is state:
            return kept
        del kept  # before others take as much memory
        return self._make(state.params)

    def keep(self, state: TrainState, copies: Params) -> None:
        """For the next step, which starts from this state."""
        self._kept, self._kept_for = copies, weakref.ref(state)
