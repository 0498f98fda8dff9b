"""Look at checkpoints: mxjax's own, Megatron's, torch's, and safetensors; import and export
Megatron's and Hugging Face's.

Exit codes: 0 done, 1 something is missing (inspect) or differs (verify), 2 it cannot be read or
imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mxjax.ckpt.atomic import new_file
from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.inspection import Summary, inspect
from mxjax.ckpt.verify import LeafComparison, compare
from mxjax.config import ConfigError

_MODEL = (
    "model_type",
    "num_layers",
    "num_hidden_layers",
    "hidden_size",
    "ffn_hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_query_groups",
    "num_key_value_heads",
    "vocab_size",
    "padded_vocab_size",
    "normalization",
    "multi_latent_attention",
    "num_experts",
    "moe_router_topk",
    "mtp_num_layers",
    "params_dtype",
)
"""Arguments shown, by the names of Megatron and Hugging Face; ``--json`` has all."""

_SHOWN = 20
"""Differing leaves shown; ``--json`` has all of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = _parse(argv)
    # Orbax warns of what `streaming` does on purpose.
    logging.getLogger("absl").setLevel(logging.ERROR)
    # JAX, which reads our own checkpoints, would take the GPUs of a run that is going on.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        return arguments.run(arguments)
    except (CheckpointFormatError, ConfigError) as error:
        print(error, file=sys.stderr)
    except OSError as error:
        named = error.filename is not None
        print(f"{error.filename}: {error.strerror}" if named else error, file=sys.stderr)
    return 2


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments, later = parser.parse_known_args(argv)
    # argparse takes all positional arguments at once: of ``logits RUN --out X a.b=c`` the last is
    # left over.
    if later and (
        not hasattr(arguments, "overrides")
        or any(word[0] == "-" or "=" not in word for word in later)
    ):
        parser.error(f"unrecognized arguments: {' '.join(later)}")
    if later:
        arguments.overrides = [*arguments.overrides, *later]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mxjax.ckpt",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    look = commands.add_parser("inspect", help="say what a checkpoint is and what it lacks")
    look.add_argument("path", type=Path, metavar="PATH", help="a folder or a file")
    look.add_argument("--json", action="store_true", help="print JSON, with all arguments")
    look.add_argument(
        "--checksums",
        action="store_true",
        help="read all of it and compare the checksums that torch stored",
    )
    look.set_defaults(run=_inspect)

    verify = commands.add_parser("verify", help="compare two checkpoints of the same kind")
    verify.add_argument("a", type=Path, metavar="A")
    verify.add_argument("b", type=Path, metavar="B")
    verify.add_argument("--json", action="store_true", help="print JSON, with all leaves")
    verify.set_defaults(run=_verify)

    convert = commands.add_parser("import", help="make a run out of another's checkpoint")
    convert.add_argument("--from", dest="source", type=Path, required=True, metavar="DIR")
    convert.add_argument("--to", dest="target", type=Path, required=True, metavar="RUN")
    convert.add_argument(
        "--config", type=Path, metavar="FILE", help="write the configuration here too"
    )
    convert.add_argument("--json", action="store_true", help="print the report as JSON")
    convert.add_argument(
        "--no-optimizer", dest="optimizer", action="store_false", help="weights only"
    )
    _add_overrides(convert)
    convert.set_defaults(run=_import)

    _add_export(commands)

    logits = commands.add_parser("logits", help="what a run's model says about given tokens")
    logits.add_argument("path", type=Path, metavar="RUN")
    logits.add_argument("--tokens", type=Path, required=True, metavar="IN.npz", help="has `tokens`")
    logits.add_argument("--out", type=Path, required=True, metavar="OUT.npz", help="gets `logits`")
    _add_overrides(logits)
    logits.set_defaults(run=_logits)
    return parser


def _add_export(commands: argparse._SubParsersAction) -> None:
    export = commands.add_parser("export", help="write a run as another's checkpoint")
    export.add_argument("--from", dest="source", type=Path, required=True, metavar="RUN")
    export.add_argument("--to", dest="target", type=Path, required=True, metavar="DIR")
    export.add_argument(
        "--format",
        choices=("torch_dist", "torch", "huggingface"),
        default="torch_dist",
        help="Megatron's: torch_dist fits any grid, torch is for the one given here; huggingface:"
        " weights alone, as transformers reads them",
    )
    export.add_argument("--step", type=int, metavar="N", help="the newest by default")
    for axis, meaning in (
        ("tp", "tensor parallel ranks"),
        ("pp", "pipeline stages"),
        ("vpp", "virtual chunks of each stage"),
        ("ep", "expert parallel ranks"),
        ("etp", "tensor parallel ranks of experts, TP by default"),
    ):
        default = None if axis == "etp" else 1
        export.add_argument(f"--{axis}", type=int, default=default, metavar="N", help=meaning)
    export.add_argument(
        "--transformer-impl",
        choices=("transformer_engine", "local"),
        default="transformer_engine",
        help="whose names of parameters format torch gets",
    )
    export.add_argument(
        "--mtp-module",
        choices=("mtp_model_layer", "transformer_layer"),
        default="mtp_model_layer",
        help="format torch: the layer within multi-token prediction; transformer_layer up to 0.16",
    )
    export.add_argument(
        "--params-dtype",
        "--dtype",
        type=lambda name: {"fp32": "float32", "bf16": "bfloat16"}.get(name, name),
        choices=("float32", "bfloat16"),
        metavar="{fp32,bf16}",
        help="of the weights; training.compute_dtype by default",
    )
    export.add_argument(
        "--max-shard-size", metavar="SIZE", help="huggingface: largest file, such as 500MB (5GB)"
    )
    export.add_argument(
        "--make-vocab-size-divisible-by",
        dest="divisible_by",
        type=int,
        default=128,
        metavar="N",
        help="pad the vocabulary of each tensor rank to a multiple of this (128)",
    )
    export.add_argument(
        "--no-optimizer", dest="optimizer", action="store_false", help="weights only"
    )
    export.add_argument("--json", action="store_true", help="print the report as JSON")
    export.set_defaults(run=_export)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="changes to the configuration"
    )


@contextmanager
def _damage_named(*paths: Path) -> Iterator[None]:
    """What a damaged file or one made to harm brings about, as an error that names it."""
    try:
        yield
    except (CheckpointFormatError, ConfigError, OSError):
        raise
    except Exception as error:
        names = " or ".join(map(str, paths))
        message = f"{names}: damaged ({type(error).__name__}: {error})"
        raise CheckpointFormatError(message) from error


def _inspect(arguments: argparse.Namespace) -> int:
    with _damage_named(arguments.path):
        summary = inspect(arguments.path, arguments.checksums)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(summary), default=str))
    else:
        _print_summary(summary)
    return 1 if summary.missing else 0


def _print_summary(summary: Summary) -> None:
    totals = {
        key: sum(counts[key] for counts in summary.dtypes.values())
        for key in ("tensors", "elements", "bytes")
    }
    rows = {
        "kind": summary.kind,
        "path": summary.path,
        "format": _pairs(summary.format),
        "step": "not recorded" if summary.step is None else summary.step,
        "others": ", ".join(summary.others),
        "grid": _pairs(summary.grid),
        "model": _pairs({k: summary.model[k] for k in _MODEL if summary.model.get(k) is not None}),
        "tensors": f"{totals['tensors']} of {totals['elements']:,} elements,"
        f" {_bytes(totals['bytes'])}",
        **{
            f"  {name}": f"{counts['tensors']}, {_bytes(counts['bytes'])}"
            for name, counts in summary.dtypes.items()
        },
        "files": _bytes(summary.file_bytes),
        "missing": ("\n" + " " * 13).join(summary.missing) or "nothing",
    }
    for name, value in rows.items():
        if value != "":
            print(f"{name:12} {value}")


def _verify(arguments: argparse.Namespace) -> int:
    with _damage_named(arguments.a, arguments.b):
        comparison = compare(arguments.a, arguments.b)
    differing = comparison.differing
    if arguments.json:
        leaves = [
            dataclasses.asdict(leaf)
            # JSON has no infinity.
            | {"max_abs": "inf" if leaf.max_abs == math.inf else leaf.max_abs}
            for leaf in comparison.leaves
        ]
        print(json.dumps({"kind": comparison.kind, "equal": not differing, "leaves": leaves}))
    else:
        for leaf in differing[:_SHOWN]:
            print(_difference(leaf))
        if len(differing) > _SHOWN:
            print(f"... and {len(differing) - _SHOWN} more")
        print(f"{len(comparison.leaves)} leaves, {len(differing)} differ")
    return 1 if differing else 0


def _difference(leaf: LeafComparison) -> str:
    if leaf.a is None or leaf.b is None:
        return f"{leaf.name}: only in {'B' if leaf.a is None else 'A'}, {leaf.b or leaf.a}"
    if leaf.a == leaf.b and leaf.max_abs is not None:
        return f"{leaf.name}: {leaf.a}, largest difference {leaf.max_abs:.3g}"
    gap = "" if leaf.max_abs is None else f", largest difference {leaf.max_abs:.3g}"
    return f"{leaf.name}: {leaf.a} in A, {leaf.b} in B{gap}"


def _import(arguments: argparse.Namespace) -> int:
    # Here, because JAX is slow to import and the other commands do without.
    from mxjax.ckpt.importing import import_checkpoint

    report = import_checkpoint(
        arguments.source, arguments.target, arguments.overrides, optimizer=arguments.optimizer
    )
    if arguments.config:
        written = (arguments.target / "config.yaml").read_text("utf-8")
        arguments.config.write_text(written, "utf-8")
    if arguments.json:
        print(json.dumps(dataclasses.asdict(report), default=str))
        return 0
    print(
        f"{report.tensors} tensors, {report.parameters:,} parameters -> {report.run_dir},"
        f" step {report.step}"
    )
    print(f"optimizer: {report.optimizer}")
    for heading, values in (
        ("taken instead of settings that are absent or unknown", report.assumed),
        ("settings without a counterpart", report.not_mapped),
    ):
        if values:
            print(f"{heading}:")
            for name, value in values.items():
                print(f"  {name}: {value}")
    return 0


_OF_MEGATRON = {
    "tp": 1,
    "pp": 1,
    "vpp": 1,
    "ep": 1,
    "etp": None,
    "transformer_impl": "transformer_engine",
    "mtp_module": "mtp_model_layer",
    "divisible_by": 128,
    "optimizer": True,
}
"""Arguments of `export` that say nothing of Hugging Face's format, with their defaults."""


def _export_huggingface(arguments: argparse.Namespace) -> int:
    from mxjax.ckpt.huggingface.exporting import export_huggingface

    given = [name for name, default in _OF_MEGATRON.items() if getattr(arguments, name) != default]
    if given:
        raise CheckpointFormatError(
            f"Format huggingface has weights only, and no grid: leave out {', '.join(given)}."
        )
    report = export_huggingface(
        arguments.source,
        arguments.target,
        arguments.params_dtype,
        arguments.max_shard_size or "5GB",
        arguments.step,
    )
    if arguments.json:
        print(json.dumps(dataclasses.asdict(report)))
        return 0
    print(
        f"{report.tensors} tensors in {report.dtype} -> {report.target}, {report.model_type},"
        f" {report.shards} files, step {report.step}"
    )
    if report.tokenizer:
        print(f"tokenizer: {', '.join(report.tokenizer)}")
    for difference in report.differences:
        print(f"not quite the same: {difference}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    if arguments.format == "huggingface":
        return _export_huggingface(arguments)
    if arguments.max_shard_size:
        raise CheckpointFormatError("--max-shard-size is for --format huggingface: leave it out.")
    from mxjax.ckpt.exporting import MegatronTarget, export_megatron
    from mxjax.ckpt.megatron.grid import Grid

    grid = Grid(arguments.tp, arguments.pp, arguments.vpp, arguments.ep, arguments.etp)
    target = MegatronTarget(
        arguments.format,
        grid,
        arguments.transformer_impl,
        arguments.mtp_module,
        arguments.params_dtype,
        arguments.optimizer,
        arguments.divisible_by,
    )
    report = export_megatron(arguments.source, arguments.target, target, arguments.step)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(report)))
        return 0
    print(
        f"{report.tensors} tensors, {report.parameters:,} parameters in {report.params_dtype}"
        f" -> {report.target}, {report.format}, iteration {report.step}"
    )
    print(f"optimizer: {report.optimizer}")
    return 0


def _logits(arguments: argparse.Namespace) -> int:
    from mxjax.ckpt.logits import run_logits

    try:
        with np.load(arguments.tokens) as given:
            tokens = given["tokens"]
        logits = run_logits(arguments.path, tokens, arguments.overrides)
    except (KeyError, ValueError) as error:
        raise CheckpointFormatError(f"{arguments.tokens}: {error}") from error
    with new_file(arguments.out) as file:
        np.savez(file, logits=logits)
    return 0


def _pairs(values: dict) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


if __name__ == "__main__":
    sys.exit(main())
