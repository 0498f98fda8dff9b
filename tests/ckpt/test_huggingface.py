"""Import and export of Hugging Face checkpoints, on tiny models that `transformers` 5.24 wrote.

`tests/data/huggingface/` holds them with the logits that `transformers` computed in fp32;
`interop/make_huggingface.py` made them.
"""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mxjax.ckpt.__main__ import main
from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.huggingface.exporting import export_huggingface
from mxjax.ckpt.huggingface.folder import open_folder
from mxjax.ckpt.importing import import_checkpoint
from mxjax.ckpt.init_from import initialize
from mxjax.ckpt.leaves import run_leaves
from mxjax.ckpt.locate import locate
from mxjax.ckpt.logits import run_logits
from mxjax.ckpt.safetensors import read_safetensors, write_safetensors
from mxjax.ckpt.torch_format.values import LazyTensor
from mxjax.ckpt.tree import named_leaves
from mxjax.config import ParallelConfig, load_config
from mxjax.models.transformer import Transformer
from mxjax.sharding.mesh import build_mesh
from mxjax.training.programs import Programs

DATA = Path(__file__).parent.parent / "data" / "huggingface"
PLAIN = sorted(folder.name for folder in DATA.iterdir() if folder.name != "deepseek_v3_fp8")


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Compiling is all that takes time here."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Imports by name, each made once."""
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def run(name):
        if name not in made:
            made[name] = folder / name
            import_checkpoint(DATA / name, made[name], progress=False)
        return made[name]

    return run


def reference(name):
    with np.load(DATA / name / "reference.npz") as found:
        return dict(found)


def assert_logits(logits, expected):
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def tensors(folder):
    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in read_safetensors(file).items()}


def state(run):
    leaves = run_leaves(locate(run).folder)
    return {name: leaf for name, leaf in leaves.items() if name.startswith(("params", "expert"))}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert tuple(tensor.shape) == tuple(b[name].shape), name
        assert tensor.numpy().tobytes() == b[name].numpy().tobytes(), name


@pytest.mark.parametrize("name", [name for name in PLAIN if name != "deepseek_v3"])
def test_logits_are_those_of_transformers(runs, name):
    expected = reference(name)
    logits = run_logits(
        runs(name), expected["tokens"], ["training.compute_dtype=float32"], progress=False
    )
    assert_logits(logits, expected["logits"])


def test_multi_token_prediction_is_that_of_transformers(runs):
    """Its logits at each position but the last, and those of the model, in one program."""
    expected, run = reference("deepseek_v3"), runs("deepseek_v3")
    config = load_config(run / "config.yaml")
    model, leaves = Transformer(config.model, config.moe), state(run)

    def logits(params, bias, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        batch = {"positions": positions, "segment_ids": jnp.ones_like(tokens)}
        ctx = model.context(batch, None)
        head = model.parts["head"].bind(params["head"])
        x, _ = model.hidden(params, bias, tokens, ctx, lambda layer, *_: layer)
        x = head.norm(x)
        ahead = jnp.roll(tokens, -1, axis=1)
        (y,), _ = model.ahead(params, bias, x, [ahead], ctx, lambda layer, *_: layer)
        return tuple(head.logits(z, params["embedding"]["weight"], False) for z in (x, y))

    mesh, spec = build_mesh(ParallelConfig(dp=1), jax.devices()[:1]), PartitionSpec()
    program = jax.jit(
        jax.shard_map(logits, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    params = jax.tree_util.tree_map_with_path(
        lambda path, _: leaves[
            "params." + jax.tree_util.keystr(path, simple=True, separator=".")
        ].numpy(),
        model.infos,
    )
    found, ahead = program(params, leaves["expert_bias"].numpy(), expected["tokens"])
    assert_logits(np.asarray(found), expected["logits"])
    assert_logits(np.asarray(ahead)[:, :-1], expected["mtp_logits"])


@pytest.mark.parametrize("name", PLAIN)
def test_export_of_an_import_is_what_transformers_wrote(runs, tmp_path, name):
    """Bit for bit; and its config.json leads to the same configuration."""
    export_huggingface(runs(name), tmp_path / "out", max_shard_size="30KB", progress=False)
    assert_equal(tensors(tmp_path / "out"), tensors(DATA / name))
    again = open_folder(tmp_path / "out")  # by the index
    assert again.names == set(tensors(DATA / name))
    import_checkpoint(tmp_path / "out", tmp_path / "again", progress=False)
    assert_equal(state(tmp_path / "again"), state(runs(name)))
    first, second = (
        (run / "config.yaml").read_text().splitlines() for run in (runs(name), tmp_path / "again")
    )
    assert [x for x in first if "run_dir" not in x] == [x for x in second if "run_dir" not in x]


def test_fp8_weights_are_multiplied_by_the_scale_of_their_block(runs):
    stored = tensors(DATA / "deepseek_v3_fp8")
    name = "model.layers.0.mlp.gate_proj.weight"
    weight, scales = stored[name], stored[f"{name}_scale_inv"].numpy()
    assert (weight.dtype, scales.shape) == (ml_dtypes.float8_e4m3fn, (2, 1))
    gate = state(runs("deepseek_v3_fp8"))["params.dense_layers.mlp.up"].numpy()[0, :, 0]
    for (row, column), value in np.ndenumerate(weight.numpy()):
        assert gate[column, row] == np.float32(value) * scales[row // 16, column // 16]


def test_bf16_is_rounded_once(runs, tmp_path):
    export_huggingface(runs("deepseek_v3"), tmp_path / "out", dtype="bfloat16", progress=False)
    original = tensors(DATA / "deepseek_v3")
    for name, tensor in tensors(tmp_path / "out").items():
        kept = "mlp.gate." in name  # as in transformers, the router and its bias
        wanted = np.float32 if kept else ml_dtypes.bfloat16
        assert tensor.numpy().tobytes() == original[name].numpy().astype(wanted).tobytes(), name
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_files_are_no_larger_than_asked_unless_one_tensor_is(runs, tmp_path):
    for size, count in (("5KiB", 7), ("1GB", 1)):
        out = tmp_path / size
        report = export_huggingface(runs("llama2"), out, max_shard_size=size, progress=False)
        files = sorted(out.glob("*.safetensors"))
        assert report.shards == len(files) == count
        for file in files:
            found = read_safetensors(file)
            assert sum(t.nbytes for t in found.values()) <= 5 * 1024 or count == 1
    index = json.loads((tmp_path / "5KiB/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for t in tensors(DATA / "llama2").values()
    )


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_run_comes_back_bit_for_bit(random_run, tmp_path, name):
    """The first has q/k norms, so it is a Qwen3. Their values are no bf16."""
    run = random_run(name)
    export_huggingface(run, tmp_path / "out", progress=False)
    import_checkpoint(tmp_path / "out", tmp_path / "run", progress=False)
    assert_equal(state(tmp_path / "run"), state(run))


def test_a_run_can_begin_with_the_weights_of_a_folder(runs):
    settings = ["parallel.dp=1", f"init_from.path={DATA / 'llama2'}"]
    config = load_config(runs("llama2") / "config.yaml", settings)
    start = initialize(config, Programs(config, build_mesh(config.parallel, jax.devices()[:1])))
    assert (start.step, start.notes) == (0, [])
    placed = {k: v for k, v in named_leaves(start.state).items() if k.startswith("params")}
    for name, leaf in state(runs("llama2")).items():
        np.testing.assert_array_equal(leaf.numpy(), placed[name], err_msg=name)
    whole = load_config(
        runs("llama2") / "config.yaml", [*settings, "init_from.training_state=true"]
    )
    with pytest.raises(CheckpointFormatError, match=r"llama2 has weights alone. Set it to false"):
        initialize(whole, None)


# What does not fit


@pytest.fixture
def changed(tmp_path):
    """Copies a model, with its config.json and tensors changed by functions."""

    def change(name, keys=None, edit=lambda arrays: None):
        folder = tmp_path / "changed"
        shutil.copytree(DATA / name, folder)
        config = json.loads((folder / "config.json").read_text()) | (keys or {})
        (folder / "config.json").write_text(json.dumps(config))
        arrays = {k: v.numpy() for k, v in tensors(folder).items()}
        if edit(arrays) is not None:
            return folder
        for file in folder.glob("model*"):
            file.unlink()
        lazy = {k: LazyTensor(v.shape, v.dtype, lambda v=v: v) for k, v in arrays.items()}
        write_safetensors(folder / "model.safetensors", lazy)
        return folder

    return change


def refused(source, tmp_path, said, overrides=()):
    before = {entry.name for entry in tmp_path.iterdir()}
    with pytest.raises(CheckpointFormatError, match=f"(?s){said}"):
        import_checkpoint(source, tmp_path / "run", overrides, progress=False)
    assert {entry.name for entry in tmp_path.iterdir()} == before


ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("llama2", {"model_type": "gpt2"}, "model_type 'gpt2'; imported are llama, qwen3"),
        ("llama2", {"hidden_size": None}, "config.json has no hidden_size"),
        ("llama2", {"attention_bias": True}, "attention_bias: True"),
        ("llama2", {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ("llama2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, "rope_type: 'dynamic'"),
        ("llama2", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.* no factor"),
        ("llama2", {"rope_parameters": ROPE | {"truncate": False}}, "rope_parameters.truncate"),
        ("qwen3", {"rope_parameters": ROPE | {"mscale_all_dim": 1.0}}, "mscale_all_dim: 1.0"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("mixtral", {"sliding_window": 32}, "sliding_window: 32"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "awq"}}, "'awq'; read are fp8"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave: False"),
        ("deepseek_v3", {"num_experts_per_tok": 6}, "num_experts_per_tok: 6 with topk_group: 2"),
        ("llama2", {"num_hidden_layers": 4}, "not in the checkpoint:.*layers.3.input_layernorm"),
        ("llama2", {"num_hidden_layers": 2}, "unknown:.*model.layers.2."),
        ("mixtral", {"num_local_experts": 6}, "experts.4.w1.weight, of shape"),
        ("qwen3_moe", {"num_local_experts": 4}, "unknown:.*mlp.experts.4."),
        ("qwen3", {"num_key_value_heads": 4}, r"k_proj.weight has shape \(16, 16\), expected"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused_and_nothing_written(
    changed, tmp_path, name, keys, said
):
    refused(changed(name, keys, edit=lambda arrays: "as it was"), tmp_path, said)


def test_files_that_are_missing_or_damaged_are_named(changed, tmp_path):
    folder = changed("llama2", edit=lambda arrays: "as it was")
    second = folder / "model-00002-of-00003.safetensors"
    content = second.read_bytes()
    second.write_bytes(content[:-4])
    refused(folder, tmp_path, "00002-of-00003.safetensors is truncated: .* should end at byte")
    second.unlink()
    refused(folder, tmp_path, "00002-of-00003.safetensors is missing, with .* tensors such as")
    shutil.copy(folder / "model-00001-of-00003.safetensors", second)
    refused(folder, tmp_path, "00002-of-00003.safetensors has no model.layers.*index.json says")
    second.write_bytes(content)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(second.name, f"../changed/{second.name}"))
    refused(folder, tmp_path, "out of its folder")
    index.write_text("{}")
    refused(folder, tmp_path, "has no `weight_map`")
    index.unlink()
    refused(folder, tmp_path, "neither model.safetensors nor model.safetensors.index.json")
    (folder / "config.json").unlink()
    refused(folder, tmp_path, "config.json is missing")


@pytest.mark.parametrize(
    ("shift", "said"),
    [
        (-64, "overlap"),
        (64, "have bytes between them that are no tensor"),
    ],
)
def test_tensors_that_share_bytes_or_leave_some_are_refused(tmp_path, shift, said):
    """As the safetensors format asks: offsets cover the file without holes."""
    header = {
        "a": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]},
        "b": {"dtype": "F32", "shape": [32], "data_offsets": [128 + shift, 256 + shift]},
    }
    encoded = json.dumps(header).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(256 + shift))
    with pytest.raises(CheckpointFormatError, match=f"a and b {said}"):
        read_safetensors(file)


def test_copies_that_are_not_copies_are_refused(changed, tmp_path):
    def edit(arrays):
        arrays["model.layers.2.embed_tokens.weight"] = arrays["model.embed_tokens.weight"] + 1

    refused(
        changed("deepseek_v3", edit=edit), tmp_path, "layers.2.embed_tokens.weight should equal"
    )


def test_a_tied_model_may_have_its_head_once_more(changed, runs, tmp_path):
    def edit(arrays):
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]

    folder = changed("llama3_bf16", edit=edit)
    import_checkpoint(folder, tmp_path / "run", progress=False)
    assert_equal(state(tmp_path / "run"), state(runs("llama3_bf16")))


def test_missing_multi_token_prediction_is_left_out_and_said(changed, tmp_path):
    """`transformers` saves DeepSeek-V3 without it and leaves the number in config.json."""

    def edit(arrays):
        for name in [name for name in arrays if ".layers.2." in name]:
            arrays.pop(name)

    report = import_checkpoint(changed("deepseek_v3", edit=edit), tmp_path / "run", progress=False)
    assert report.assumed["num_nextn_predict_layers"] == "0: there is no layer 2"
    assert load_config(tmp_path / "run/config.yaml").model.mtp_num_layers == 0


def test_fp8_without_scales_is_refused(changed, tmp_path):
    scale = "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"
    said = "experts.2.up_proj.weight is stored as float8_e4m3fn without .*, its scales"
    refused(changed("deepseek_v3_fp8", edit=lambda a: a.pop(scale) and None), tmp_path, said)


# Commands and what goes with the weights


def test_commands_convert_both_ways_with_the_tokenizer(changed, tmp_path, capsys):
    folder = changed(
        "qwen3", {"eos_token_id": 3, "bos_token_id": 1, "new_key": 5}, lambda a: "as it was"
    )
    added = [{"id": 3, "content": "<|end|>", "special": True}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (folder / "tokenizer_config.json").write_text("{}")
    run, out = str(tmp_path / "run"), tmp_path / "out"
    assert main(["import", "--from", str(folder), "--to", run, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["not_mapped"] == {"bos_token_id": 1, "new_key": 5}
    assert load_config(tmp_path / "run/config.yaml").data.eod_token == "<|end|>"
    command = ["export", "--from", run, "--to", str(out), "--format", "huggingface"]
    assert main([*command, "--dtype", "bf16", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["dtype"], report["shards"], report["model_type"]) == ("bfloat16", 1, "qwen3")
    assert report["tokenizer"] == ["tokenizer.json", "tokenizer_config.json"]
    assert (out / "tokenizer_config.json").exists()
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 3
    assert main([*command, "--tp", "2"]) == 2
    assert "leave out tp" in capsys.readouterr().err
    assert main(command) == 2
    assert "out exists" in capsys.readouterr().err


def test_balancing_bias_that_the_family_does_not_have_is_refused(random_run, tmp_path):
    """By the configuration, or by the bias that there is."""
    run = tmp_path / "run"
    shutil.copytree(random_run("mixtral", "moe.expert_bias_update_rate=0.001"), run)
    with pytest.raises(CheckpointFormatError, match=r"moe.expert_bias_update_rate: 0.001"):
        export_huggingface(run, tmp_path / "out", progress=False)
    metadata = locate(run).folder / "metadata/metadata"
    text = metadata.read_text()
    metadata.write_text(text.replace("bias_update_rate: 0.001", "bias_update_rate: 0"))
    with pytest.raises(CheckpointFormatError, match="routers have a balancing bias, and mixtral"):
        export_huggingface(run, tmp_path / "out", progress=False)


def test_a_failed_export_leaves_nothing(runs, tmp_path, monkeypatch):
    def full(self, place, which):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mxjax.ckpt.huggingface.exporting._LastPlace.read", full)
    with pytest.raises(OSError, match="No space"):
        export_huggingface(runs("qwen3"), tmp_path / "out", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_is_none_is_refused(runs, tmp_path):
    with pytest.raises(CheckpointFormatError, match="--max-shard-size 5 GX: write a size"):
        export_huggingface(runs("qwen3"), tmp_path / "out", max_shard_size="5 GX")
