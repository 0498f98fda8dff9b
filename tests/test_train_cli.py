"""The command line's answer to a bad configuration."""

import pytest

from mxjax import train


@pytest.mark.parametrize(
    ("text", "overrides", "line"),
    [
        ("model: {num_layers: 0}", [], "model.num_layers: 0 -- must be at least 1"),
        ("optimizer: {seq_length: 8}", [], "did you mean training.seq_length?"),
        ("{}", ["moe.num_experts=8", "moe.router_topk=9"], "moe.router_topk: 9 -- must be at most"),
        ("{}", ["parallel.pp=2", "parallel.dp=1"], "parallel.pp: 2 -- "),
        ("model: [", [], "is not valid YAML"),
        ("", [], "an empty file is written {}"),
    ],
)
def test_bad_config_exits_2(tmp_path, capsys, text, overrides, line):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as exit_info:
        raise SystemExit(train.main(["--config", str(path), *overrides]))
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert line in message
    assert "Traceback" not in message
