"""What `docs/tutorial.md` shows of the files in `examples/` is what they hold."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"```(python|yaml)\n(.*?)```", TUTORIAL, re.DOTALL)


@pytest.mark.parametrize(("language", "block"), BLOCKS, ids=lambda text: text.split("\n")[0][:40])
def test_code_is_that_of_the_example(language, block):
    names = {"python": "*.py", "yaml": "*.yaml"}[language]
    assert any(block in path.read_text() for path in (ROOT / "examples").glob(names))


def test_the_whole_router_and_its_configuration_are_shown():
    for name in ("cosine_router.py", "cosine_router.yaml"):
        assert (ROOT / "examples" / name).read_text() in TUTORIAL


def test_files_and_tests_that_it_names_exist():
    for name in set(re.findall(r"`((?:mxjax|examples|configs|docs|tests)/[\w/.]+)`", TUTORIAL)):
        assert (ROOT / name).exists(), name
    tests = (ROOT / "examples" / "test_cosine_router.py").read_text()
    for name in set(re.findall(r"`(test_\w+)`", TUTORIAL)):
        assert f"def {name}(" in tests
