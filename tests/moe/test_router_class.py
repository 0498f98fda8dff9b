"""A router named by `moe.router`: found and used, or refused in plain words."""

import jax
import pytest

from mxjax.config import ConfigError, MoEConfig, load_config
from mxjax.config.schema import ModelConfig
from mxjax.models.parts import Part
from mxjax.moe.layer import MoE
from mxjax.moe.router import Router
from mxjax.moe.router_class import router_class


class LastExperts(Router):
    """Logits that rise with the expert's number."""

    def _logits(self, x_TH):
        logits_TE = super()._logits(x_TH)
        return 0 * logits_TE + jax.numpy.arange(float(self.moe.num_experts))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """An importable module of this name, with this text -> its name."""

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        return name

    return write


def test_null_is_the_built_in_router():
    assert router_class(None) is Router


def test_a_layer_is_built_with_the_named_router(module):
    name = module("named_router", "from mxjax.moe.router import Router\nclass Mine(Router): pass\n")
    model = ModelConfig(hidden_size=16, ffn_hidden_size=16)
    moe = MoEConfig(num_experts=4, router=f"{name}:Mine")
    built = []
    Part(lambda rngs: built.append(MoE(model, moe, True, 2.0, rngs)) or built[-1])
    assert type(built[-1].router).__name__ == "Mine"


def test_one_method_changes_who_is_chosen():
    model, moe = ModelConfig(hidden_size=16), MoEConfig(num_experts=4, router_topk=2)
    part = Part(lambda rngs: LastExperts(model, moe, rngs))
    router = part.bind(part.init(jax.random.key(0)))
    x = jax.random.normal(jax.random.key(1), (1, 3, 16))
    experts_TK, _, _ = router(x, jax.numpy.ones((1, 3), bool), jax.numpy.zeros(4))
    assert experts_TK.tolist() == [[3, 2]] * 3


@pytest.mark.parametrize(
    ("router", "expected"),
    [
        ("Mine", "must be written module:Class"),
        ("nowhere.at_all:Mine", "nowhere.at_all cannot be imported (ModuleNotFoundError"),
        ("broken_router:Mine", "broken_router cannot be imported (ZeroDivisionError"),
        ("leaving_router:Mine", "leaving_router cannot be imported (SystemExit"),
        ("math:Mine", "math has no class Mine that extends mxjax.moe.router.Router"),
        ("collections:OrderedDict", "collections has no class OrderedDict that extends"),
    ],
)
def test_what_is_no_router_is_a_problem_of_the_configuration(router, expected, module, tmp_path):
    module("broken_router", "1 / 0\n")
    module("leaving_router", "raise SystemExit(0)\n")
    path = tmp_path / "config.yaml"
    path.write_text(f"moe: {{num_experts: 8, router: '{router}'}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (problem,) = caught.value.problems
    assert problem.path == "moe.router"
    assert problem.value == router
    assert expected in problem.message


def test_without_experts_nothing_is_imported(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("moe: {router: 'nowhere:Mine'}\n")
    with pytest.raises(ConfigError, match=r"does nothing while moe\.num_experts is 0") as caught:
        load_config(path)
    assert len(caught.value.problems) == 1
