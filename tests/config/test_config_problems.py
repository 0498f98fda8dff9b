"""Every bad configuration gives one readable line that names path, value and way out."""

import pytest

from mxjax.config import ConfigError, load_config

MOE = {"moe.num_experts": 8}
TEXT = {"data.source": "text", "data.paths": "[x.txt]"}

# settings, path, value as shown, words of the message
BAD = [
    # types and single values
    ({"model.num_layers": "four"}, "model.num_layers", '"four"', ["a whole number", "4"]),
    ({"model.num_layers": "true"}, "model.num_layers", "true", ["a whole number"]),
    ({"model.num_layers": "'4'"}, "model.num_layers", '"4"', ["a whole number"]),
    ({"model.num_layers": ""}, "model.num_layers", "null", ["a whole number", "default is 4"]),
    ({"model.head_dim": "x"}, "model.head_dim", '"x"', ["a whole number or null"]),
    ({"training.num_steps": "1e3"}, "training.num_steps", "1000.0", ["write 1000"]),
    ({"training.num_steps": "0"}, "training.num_steps", "0", ["at least 1"]),
    ({"optimizer.lr": "fast"}, "optimizer.lr", '"fast"', ["a number", "0.0003"]),
    ({"optimizer.lr": "0"}, "optimizer.lr", "0", ["more than 0"]),
    ({"optimizer.lr": ".inf"}, "optimizer.lr", "Infinity", ["a finite number"]),
    ({"optimizer.beta1": "1"}, "optimizer.beta1", "1", ["less than 1"]),
    ({"parallel.zero_stage": "4"}, "parallel.zero_stage", "4", ["at most 3"]),
    ({"optimizer.name": "adam"}, "optimizer.name", '"adam"', ["adamw, adafactor, sgd or muon"]),
    ({"data.shuffle": "1"}, "data.shuffle", "1", ["true or false", "default is true"]),
    ({"data.text_key": "5"}, "data.text_key", "5", ["text", 'write "5"']),
    ({"data.text_key": "[a]"}, "data.text_key", '["a"]', ["text", "default"]),
    ({"data.exclude": "x"}, "data.exclude", '"x"', ["a list", 'write ["x"]']),
    ({"moe.capacity_buckets": "[2, 0.5]"}, "moe.capacity_buckets[1]", "0.5", ["at least 1"]),
    ({"log.profile_steps": "[1]"}, "log.profile_steps", "[1]", ["list or null", "no entry 2"]),
    ({"log.profile_steps": "[1, 2, 3]"}, "log.profile_steps", "[1, 2, 3]", ["list of 2"]),
    ({"remat": "full"}, "remat", '"full"', ["a mapping", "policy"]),
    ({"model.rope_scaling": "8"}, "model.rope_scaling", "8", ["a mapping or null", "factor"]),
    # unknown keys
    ({"modle.num_layers": "2"}, "modle", '{"num_layers": 2}', ["unknown", "mean model?"]),
    ({"moe.num_expert": "8"}, "moe.num_expert", "8", ["mean moe.num_experts?"]),
    ({"optimizer.seq_length": "8"}, "optimizer.seq_length", "8", ["mean training.seq_length?"]),
    ({"checkpoint.interval": "8"}, "checkpoint.interval", "8", ["checkpoint.save_interval or log"]),
    ({"lr": "1"}, "lr", "1", ["mean optimizer.lr?"]),
    ({"model.factor": "2"}, "model.factor", "2", ["mean model.rope_scaling.factor?"]),
    ({"remat.seq_lenght": "8"}, "remat.seq_lenght", "8", ["mean training.seq_length?"]),
    ({"remat.zzz": "8"}, "remat.zzz", "8", ["use one of those of remat: policy"]),
    ({"zzz": "8"}, "zzz", "8", ["use one of those of the top level: run_dir, model"]),
    ({"run_dir": "gs://bucket/run"}, "run_dir", '"gs://bucket/run"', ["mount"]),
    # model
    ({"model.num_query_groups": "3"}, "model.num_query_groups", "3", ["model.num_attention_heads (8)"]),
    ({"model.hidden_size": "100"}, "model.hidden_size", "100", ["(8)", "set model.head_dim"]),
    ({"model.head_dim": "33"}, "model.head_dim", "33", ["odd width", "even"]),
    ({"model.hidden_size": "24"}, "model.hidden_size", "24", ["odd width 3", "even"]),
    ({"model.head_dim": "36", "model.attention_implementation": "cudnn"}, "model.head_dim", "36", ["multiple of 8", "to auto"]),
    ({"model.head_dim": "512", "model.attention_implementation": "cudnn"}, "model.head_dim", "512", ["up to 256", "to auto"]),
    ({"training.compute_dtype": "float32", "model.attention_implementation": "cudnn"}, "model.attention_implementation", '"cudnn"', ["bfloat16", "auto"]),
    ({"model.attention_dropout": "0.1", "model.attention_implementation": "cudnn"}, "model.attention_implementation", '"cudnn"', ["model.attention_dropout", "auto"]),
    ({"parallel.cpu_devices": "1", "model.attention_implementation": "cudnn"}, "model.attention_implementation", '"cudnn"', ["parallel.cpu_devices", "auto"]),
    ({"training.deterministic": "true", "model.attention_implementation": "cudnn"}, "training.deterministic", "true", ["backward pass", "auto, mosaic or xla"]),
    ({"model.head_dim": "96", "training.seq_length": "128", "model.attention_implementation": "mosaic"}, "model.head_dim", "96", ["multiple of 64", "to auto"]),
    ({"model.mla": "{v_head_dim: 192}", "training.seq_length": "128", "model.attention_implementation": "mosaic"}, "model.mla.v_head_dim", "192", ["64 or 128", "to auto"]),
    ({"model.mla": "{v_head_dim: 256}", "model.attention_implementation": "cudnn"}, "model.mla.v_head_dim", "256", ["width of keys (192)", "to auto"]),
    ({"model.head_dim": "192", "training.seq_length": "128", "model.attention_implementation": "mosaic"}, "model.head_dim", "192", ["up to 128", "to auto"]),
    ({"training.seq_length": "65", "model.attention_implementation": "cudnn"}, "training.seq_length", "65", ["multiple of 2", "auto"]),
    ({"model.head_dim": "64", "training.seq_length": "192", "model.attention_implementation": "mosaic"}, "training.seq_length", "192", ["multiple of 128", "auto"]),
    ({"model.head_dim": "64", "training.seq_length": "128", "parallel.cp": "2", "model.attention_implementation": "mosaic"}, "training.seq_length", "128", ["multiple of 512", "parallel.cp", "auto"]),
    ({"model.head_dim": "64", "training.seq_length": "128", "model.attention_dropout": "0.1", "model.attention_implementation": "mosaic"}, "model.attention_implementation", '"mosaic"', ["model.attention_dropout", "auto"]),
    ({"model.position_embedding": "learned", "model.rope_scaling": "{kind: linear}"}, "model.rope_scaling", '"linear"', ["learned", "null"]),
    ({"model.rope_scaling": "{low_freq_factor: 4}"}, "model.rope_scaling.low_freq_factor", "4.0", ["less than high_freq_factor (4.0)"]),
    ({"training.seq_length": "8192"}, "training.seq_length", "8192", ["model.max_position_embeddings (4096)", "lower it"]),
    ({**TEXT, "model.vocab_size": "256"}, "model.vocab_size", "256", ["at least 257"]),
    ({"log.sample_tokens": "9", "model.vocab_size": "64"}, "model.vocab_size", "64", ["at least 257"]),
    ({"model.rope_theta": "1", "model.rope_scaling": "{kind: yarn}"}, "model.rope_theta", "1.0", ["more than 1"]),
    ({"model.rope_scaling": "{kind: yarn, beta_slow: 40}"}, "model.rope_scaling.beta_slow", "40.0", ["less than beta_fast (32.0)"]),
    ({"model.mla": "{}", "model.num_query_groups": "2"}, "model.num_query_groups", "2", ["model.mla", "null"]),
    ({"model.mla": "{}", "model.head_dim": "32"}, "model.head_dim", "32", ["model.mla", "null"]),
    ({"model.mla": "{}", "model.qk_layernorm": "true"}, "model.qk_layernorm", "true", ["latents", "false"]),
    ({"model.mla": "{}", "model.add_qkv_bias": "true"}, "model.add_qkv_bias", "true", ["no biases", "false"]),
    ({"model.mla": "{}", "model.add_bias_linear": "true"}, "model.add_bias_linear", "true", ["no biases", "false"]),
    ({"model.mla": "{}", "model.position_embedding": "learned"}, "model.position_embedding", '"learned"', ["rotary", "rope"]),
    ({"model.mla": "{qk_rope_head_dim: 7}"}, "model.mla.qk_rope_head_dim", "7", ["even"]),
    ({"model.mla": "{qk_nope_head_dim: 200}", "model.attention_implementation": "cudnn"}, "model.mla.qk_nope_head_dim", "200", ["up to 256", "to auto"]),
    ({"model.mla": "{q_lora_rank: 9}", "parallel.dp": "2"}, "model.mla.q_lora_rank", "9", ["2 data-like ranks"]),
    ({"model.mla": "{kv_lora_rank: 9}", "parallel.dp": "2"}, "model.mla.kv_lora_rank", "9", ["2 data-like ranks"]),
    ({"model.mla": "{kv_lora_rank: 6}", "parallel.dp": "2", "parallel.pp": "2", "model.mtp_num_layers": "1"}, "model.mla.kv_lora_rank", "6", ["4 ranks", "pp for multi-token prediction"]),
    ({"model.mtp_num_layers": "1", "model.position_embedding": "learned"}, "model.mtp_num_layers", "1", ["rotary"]),
    ({"model.mtp_num_layers": "8", "training.seq_length": "8"}, "model.mtp_num_layers", "8", ["training.seq_length (8)", "lower it"]),
    # experts
    ({**MOE, "moe.group_topk": "2"}, "moe.group_topk", "2", ["moe.num_groups is null"]),
    ({**MOE, "moe.group_score": "max"}, "moe.group_score", '"max"', ["moe.num_groups is null"]),
    ({**MOE, "moe.num_groups": "3", "moe.group_topk": "1"}, "moe.num_groups", "3", ["divide moe.num_experts (8)"]),
    ({**MOE, "moe.num_groups": "4"}, "moe.group_topk", "null", ["1 to moe.num_groups (4)"]),
    ({**MOE, "moe.num_groups": "4", "moe.group_topk": "5"}, "moe.group_topk", "5", ["1 to moe.num_groups (4)"]),
    ({**MOE, "moe.num_groups": "8", "moe.group_topk": "1"}, "moe.router_topk", "2", ["1 experts", "lower it"]),
    ({**MOE, "moe.num_groups": "4", "moe.group_topk": "2", "moe.router_topk": "3"}, "moe.group_topk", "2", ["divide moe.router_topk (3)", "max"]),
    ({"moe.aux_loss_coeff": "0.1"}, "moe.aux_loss_coeff", "0.1", ["nothing while moe.num_experts is 0"]),
    ({**MOE, "moe.router_topk": "9"}, "moe.router_topk", "9", ["at most moe.num_experts (8)", "lower it or add experts"]),
    ({**MOE, "moe.router_topk": "1"}, "moe.router_topk", "1", ["router_pre_softmax to true"]),
    ({**MOE, "moe.router_topk": "1", "moe.score_function": "sigmoid", "moe.norm_topk_prob": "true"}, "moe.norm_topk_prob", "true", ["set it to false"]),
    ({**MOE, "moe.score_function": "sigmoid", "moe.router_pre_softmax": "true"}, "moe.router_pre_softmax", "true", ["sigmoid", "set it to false"]),
    ({**MOE, "moe.first_k_dense": "4"}, "moe.first_k_dense", "4", ["less than model.num_layers (4)"]),
    ({**MOE, "moe.capacity_buckets": "[2, 1.5]"}, "moe.capacity_buckets", "[2.0, 1.5]", ["grow", "sort it"]),
    # axes
    ({"parallel.pp": "2", "parallel.cp": "2"}, "parallel.cp_rotation", '"ppermute"', ["parallel.pp > 1", "set it to alltoall", "allgather"]),
    ({"parallel.pp": "3", "parallel.zero_stage": "0"}, "model.num_layers", "4", ["3 stages hold 3 or 6", "set pipeline.empty_layers to auto (2 empty)"]),
    ({"parallel.pp": "2", "pipeline.vpp": "2"}, "pipeline.vpp", "2", ["1f1b has 1 chunk a rank", "interleaved"]),
    ({"parallel.pp": "2", "pipeline.schedule": "dualpipev", "pipeline.vpp": "3", "training.num_microbatches": "4"}, "pipeline.vpp", "3", ["dualpipev has 2 chunks a rank"]),
    ({"parallel.pp": "2", "pipeline.schedule": "dualpipev"}, "training.num_microbatches", "1", ["needs at least 4", "1f1b"]),
    ({"parallel.pp": "2", "pipeline.cells": "joint", "pipeline.schedule": "gpipe"}, "pipeline.cells", '"joint"', ["it has full, split"]),
    ({"pipeline.costs": "1,1,1"}, "pipeline.costs", '"1,1,1"', ["measured or a list", "[1.0, 1.3, 1.15, 2.35]"]),
    ({"pipeline.costs": "[1, x, 1]"}, "pipeline.costs[1]", '"x"', ["must be a number"]),
    ({"pipeline.empty_layers": "foo"}, "pipeline.empty_layers", '"foo"', ["auto or a list", "[]"]),
    ({"pipeline.empty_layers": "[1.5]"}, "pipeline.empty_layers[0]", "1.5", ["must be a whole number"]),
    ({"parallel.pp": "2", "pipeline.costs": "[0, 1, 1]"}, "pipeline.costs", "[0.0, 1.0, 1.0]", ["F is 0", "above 0"]),
    ({"parallel.pp": "2", "pipeline.layout": "Ett|tL"}, "pipeline.layout", '"Ett|tL"', ["3 times t", "model.num_layers is 4"]),
    ({"parallel.pp": "2", "pipeline.num_layers_in_first_pipeline_stage": "5"}, "pipeline.num_layers_in_first_pipeline_stage", "5", ["5 layers on the given ranks", "more than the 4"]),
    ({"parallel.pp": "4", "model.mtp_num_layers": "1", "pipeline.layout": "Ett|tt|m|L"}, "pipeline.layout", '"Ett|tt|m|L"', ["move m to the last stage"]),
    ({"training.seq_length": "252", "parallel.cp": "4"}, "training.seq_length", "252", ["multiple of 8", "parallel.cp (4", "use 256"]),
    ({"training.seq_length": "250", "parallel.cp": "2", "parallel.sp": "2", "parallel.tp": "2"}, "training.seq_length", "250", ["multiple of 8", "parallel.sp (2)", "use 256"]),
    ({"parallel.sp": "4", "parallel.tp": "4", "model.num_query_groups": "4"}, "model.num_attention_heads", "8", ["4 * 4 = 16", "parallel.cp instead"]),
    ({"parallel.cp": "3", "parallel.cp_rotation": "alltoall", "training.seq_length": "252", "parallel.zero_stage": "0"}, "parallel.cp_rotation", '"alltoall"', ["(3) must be even", "use ppermute"]),
    ({"parallel.cp_method": "rings"}, "parallel.cp_method", '"rings"', ["ring or allgather"]),
    ({"parallel.tp": "0"}, "parallel.tp", "0", ["set it to 1"]),
    ({"parallel.tp": "-1"}, "parallel.tp", "-1", ["only one", "parallel.dp is", "a size"]),
    ({"parallel.ep": "2"}, "parallel.ep", "2", ["moe.num_experts is 0", "set it to 1"]),
    ({"moe.num_experts": "9", "parallel.ep": "2"}, "moe.num_experts", "9", ["parallel.ep (2)"]),
    ({"moe.num_experts": "6", "parallel.ep": "2", "parallel.tp": "2", "parallel.expert_tensor_parallel": "false"}, "moe.num_experts", "6", ["parallel.ep * parallel.tp (4)"]),
    ({"model.head_dim": "32", "model.num_attention_heads": "9", "parallel.tp": "2"}, "model.num_attention_heads", "9", ["parallel.tp (2)"]),
    ({"model.num_attention_heads": "24", "model.head_dim": "8", "model.num_query_groups": "6", "parallel.tp": "4"}, "model.num_query_groups", "6", ["parallel.tp (4)"]),
    ({"model.ffn_hidden_size": "1023", "parallel.tp": "2"}, "model.ffn_hidden_size", "1023", ["parallel.tp (2)"]),
    ({**MOE, "model.ffn_hidden_size": "1023", "parallel.tp": "2"}, "model.ffn_hidden_size", "1023", ["expert_tensor_parallel to false"]),
    ({**MOE, "moe.first_k_dense": "1", "model.ffn_hidden_size": "1023", "parallel.tp": "2"}, "model.ffn_hidden_size", "1023", ["parallel.tp (2)"]),
    ({**MOE, "moe.moe_ffn_hidden_size": "65", "parallel.tp": "2"}, "moe.moe_ffn_hidden_size", "65", ["expert_tensor_parallel to false"]),
    ({**MOE, "moe.shared_expert_intermediate_size": "65", "parallel.tp": "2"}, "moe.shared_expert_intermediate_size", "65", ["parallel.tp (2)"]),
    ({"model.vocab_size": "321", "parallel.tp": "2"}, "model.vocab_size", "321", ["parallel.tp (2)"]),
    ({"training.seq_length": "255", "parallel.tp": "2"}, "training.seq_length", "255", ["sequence_parallel to false"]),
    ({**MOE, "training.seq_length": "255", "training.global_batch_size": "3", "parallel.tp": "2", "parallel.sequence_parallel": "false", "parallel.expert_tensor_parallel": "false"}, "training.seq_length", "255", ["multiple of 2"]),
    ({"parallel.dp": "3", "training.global_batch_size": "3"}, "model.hidden_size", "256", ["3 data-like ranks", "parallel.zero_stage to 0"]),
    # training and optimizer
    ({"training.num_microbatches": "3"}, "training.global_batch_size", "16", ["= 3", "use 18"]),
    ({"training.param_dtype": "bfloat16", "training.compute_dtype": "float32"}, "training.param_dtype", '"bfloat16"', ["set it to float32"]),
    ({"optimizer.warmup_steps": "1001"}, "optimizer.warmup_steps", "1001", ["training.num_steps (1000)", "lower it"]),
    ({"optimizer.min_lr": "1e-3"}, "optimizer.min_lr", "0.001", ["optimizer.lr (0.0003)", "lower it"]),
    ({"optimizer.schedule": "constant", "optimizer.min_lr": "1e-5"}, "optimizer.min_lr", "1e-05", ["remove it"]),
    ({"optimizer.schedule": "constant", "optimizer.decay_steps": "9"}, "optimizer.decay_steps", "9", ["remove it"]),
    ({"optimizer.warmup_steps": "10", "optimizer.decay_steps": "10"}, "optimizer.decay_steps", "10", ["optimizer.warmup_steps (10)", "raise it"]),
    ({"optimizer.schedule": "wsd", "optimizer.decay_steps": "0"}, "optimizer.decay_steps", "0", ["raise it"]),
    ({"optimizer.schedule": "wsd", "optimizer.warmup_steps": "10", "optimizer.decay_steps": "991"}, "optimizer.decay_steps", "991", ["training.num_steps (1000)", "lower one"]),
    ({"optimizer.schedule": "wsd", "optimizer.warmup_steps": "901"}, "optimizer.decay_steps", "null", ["a decay of 100", "lower one"]),
    ({"optimizer.name": "adafactor", "optimizer.moments_dtype": "bfloat16"}, "optimizer.moments_dtype", '"bfloat16"', ["adafactor", "remove it"]),
    # data, checkpoints, log
    ({"data.source": "text"}, "data.paths", "[]", ["name files, folders or globs"]),
    ({"data.paths": "[x]"}, "data.paths", '["x"]', ["synthetic", "set data.source"]),
    ({"data.validation_paths": "[x]"}, "data.validation_paths", '["x"]', ["synthetic", "set data.source"]),
    ({"data.blend": "[[1, x]]"}, "data.blend", '[[1.0, "x"]]', ["synthetic", "set data.source"]),
    ({"data.source": "text", "data.blend": "[[0, x]]"}, "data.blend[0][0]", "0", ["more than 0"]),
    ({"data.source": "text", "data.blend": "[[1, x], [x, y]]"}, "data.blend[1][0]", '"x"', ["a number"]),
    ({"data.source": "text", "data.blend": "[[1]]"}, "data.blend", "[1]", ["no entry 2"]),
    ({**TEXT, "data.blend": "[[1, x]]"}, "data.blend", '[[1.0, "x"]]', ["beside data.paths"]),
    ({"data.source": "text", "data.blend": "[[1, x], [2, x]]"}, "data.blend", '[[1.0, "x"], [2.0, "x"]]', ["'x' more than once"]),
    ({**TEXT, "data.num_epochs": "1", "data.blend_stop": "all_exhausted"}, "data.blend_stop", '"all_exhausted"', ["without data.blend"]),
    ({"data.source": "text", "data.blend": "[[1, x]]", "data.blend_stop": "all_exhausted"}, "data.blend_stop", '"all_exhausted"', ["data.num_epochs is null"]),
    ({**TEXT, "data.tokenizer": "t.json"}, "data.eod_token", "null", ["name it, such as <|endoftext|>"]),
    ({**TEXT, "data.eod_token": "</s>"}, "data.eod_token", '"</s>"', ["256", "set this to null"]),
    ({"data.num_epochs": "1"}, "data.num_epochs", "1", ["null", "training.num_steps"]),
    ({**TEXT, "training.eval_interval": "5", "data.validation_fraction": "0"}, "training.eval_interval", "5", ["raise data.validation_fraction"]),
    ({"checkpoint.restore_step": "1001"}, "checkpoint.restore_step", "1001", ["training.num_steps (1000)"]),
    ({"checkpoint.keep_every": "5"}, "checkpoint.keep_every", "5", ["checkpoint.save_interval is 0"]),
    ({"log.profile_steps": "[5, 3]"}, "log.profile_steps", "[5, 3]", ["write [3, 5]"]),
    ({"log.profile_steps": "[5, 1001]"}, "log.profile_steps", "[5, 1001]", ["training.num_steps (1000)"]),
    ({"log.sample_tokens": "9", "log.sample_prompt": "''"}, "log.sample_prompt", '""', ["sample_tokens to 0"]),
    ({"log.sample_tokens": "253"}, "log.sample_tokens", "253", ["4 bytes", "training.seq_length (256)"]),
    ({"run_dir": "''"}, "run_dir", '""', ["runs/default"]),
]  # fmt: skip


@pytest.fixture
def empty_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("{}")
    return path


def problems_of(path, settings, **kwargs):
    with pytest.raises(ConfigError) as error:
        load_config(path, [f"{key}={value}" for key, value in settings.items()], **kwargs)
    assert str(error.value).count("\n") == len(error.value.problems)
    return error.value.problems


@pytest.mark.parametrize(
    ("settings", "path", "value", "words"),
    BAD,
    ids=[f"{case[1]}-{i}" for i, case in enumerate(BAD)],
)
def test_bad_setting_gives_one_line_with_path_value_and_way_out(
    empty_file, settings, path, value, words
):
    (problem,) = problems_of(empty_file, settings)
    assert problem.path == path
    line = str(problem)
    assert line.startswith(f"{path}: ")
    assert value in line.split(" -- ")[0]
    for word in words:
        assert word in problem.message


def test_message_is_the_documented_line(empty_file):
    with pytest.raises(ConfigError) as error:
        load_config(empty_file, ["moe.num_experts=8", "moe.router_topk=9"])
    assert str(error.value) == (
        "The configuration has a problem:\n"
        "  moe.router_topk: 9 -- must be at most moe.num_experts (8); lower it or add experts "
        "(override moe.router_topk=9)"
    )


def test_wrong_types_unknown_keys_and_cross_problems_are_reported_together(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: {num_layers: four, num_query_groups: 3}\n"
        "moe: {num_experts: 8, router_topk: 9}\n"
        "optimizer: {seq_length: 128}\n"
        "parallel: {tp: 3}\n"
    )
    problems = problems_of(path, {"log.interval": 0, "oops": 1}, device_count=lambda _: 8)
    paths = {problem.path for problem in problems}
    assert {
        "model.num_layers",
        "model.num_query_groups",
        "moe.router_topk",
        "optimizer.seq_length",
        "parallel.dp",
        "log.interval",
        "oops",
    } <= paths


@pytest.mark.parametrize(
    "settings",
    [
        {"moe.num_experts": "many", "moe.router_topk": "9"},
        {"moe.num_expert": "8", "moe.router_topk": "9"},
        {"mo": "{num_experts: 8}", "moe.router_topk": "9"},
        {"model.rope_scaling": "{low_freq_factor: 5, high_freq_factor: x}"},
        {"parallel.dp": "x", "parallel.ep": "-1"},
        {"parallel": "x", "training.global_batch_size": "7"},
    ],
)
def test_no_problem_is_derived_from_a_refused_value(empty_file, settings):
    (problem,) = problems_of(empty_file, settings, device_count=lambda _: 8)
    assert problem.path == next(iter(settings)) or "high_freq" in problem.path


def test_two_wrong_entries_of_a_list_are_both_reported(empty_file):
    problems = problems_of(empty_file, {"moe.capacity_buckets": "[0.5, x]"})
    assert [p.path for p in problems] == ["moe.capacity_buckets[0]", "moe.capacity_buckets[1]"]


@pytest.mark.parametrize(
    "settings",
    [
        {**MOE, "parallel.tp": "2", "parallel.sequence_parallel": "false", "parallel.expert_tensor_parallel": "false"},
        {"model.attention_dropout": "0.1"},
        {"model.num_query_groups": "2", "parallel.tp": "4"},
        {"model.num_query_groups": "4", "parallel.tp": "2"},
        {**MOE, "model.ffn_hidden_size": "1023", "moe.moe_ffn_hidden_size": "64", "parallel.tp": "2"},
        {**MOE, "moe.moe_ffn_hidden_size": "65", "parallel.tp": "2", "parallel.expert_tensor_parallel": "false"},
        {"parallel.dp": "3", "training.global_batch_size": "3", "parallel.zero_stage": "0"},
        {"model.vocab_size": "64"},
        {"model.vocab_size": "64", "data.source": "indexed", "data.paths": "[x]"},
        {"model.vocab_size": "64", **TEXT, "data.tokenizer": "t.json", "data.eod_token": "</s>"},
        {"data.source": "jsonl", "data.blend": "[[1, a], [0.5, b]]", "data.num_epochs": "2", "data.blend_stop": "all_exhausted"},
        {"model.tie_embeddings": "true", "model.position_embedding": "learned", "model.head_dim": "33"},
        {**TEXT, "training.eval_interval": "5", "data.validation_fraction": "0", "data.validation_paths": "[y.txt]"},
        {"optimizer.schedule": "wsd", "optimizer.warmup_steps": "10", "optimizer.decay_steps": "990"},
        {"moe.capacity_buckets": "[]", **MOE},
    ],
)  # fmt: skip
def test_combinations_that_work_are_accepted(empty_file, settings):
    load_config(empty_file, [f"{key}={value}" for key, value in settings.items()])
