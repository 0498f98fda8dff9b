import json
import os
import sysconfig

import pytest

from mxjax.data.errors import DataError
from mxjax.data.sources import find_files, read_documents


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A folder of text files, which is the working directory."""
    for name in (
        "b.txt",
        "a.txt",
        "notes.md",
        ".hidden.txt",
        "sub/c.txt",
        "sub/deep/d.txt",
        "tests/e.txt",
        "x[1].txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def find(patterns, exclude=(), file_format="text"):
    """Found files, as seen from the working directory."""
    return [
        os.path.relpath(path) for path in find_files(patterns, exclude, file_format, "data.paths")
    ]


@pytest.mark.parametrize(
    ("patterns", "files"),
    [
        (["b.txt"], ["b.txt"]),
        (["*.txt"], ["a.txt", "b.txt", "x[1].txt"]),
        (["sub/**/*.txt"], ["sub/c.txt", "sub/deep/d.txt"]),
        (["sub"], ["sub/c.txt", "sub/deep/d.txt"]),
        (["sub/*"], ["sub/c.txt"]),
        (["x[1].txt"], ["x[1].txt"]),
        (["b.txt", "a.txt", "*.txt", "./sub/../a.txt"], ["a.txt", "b.txt", "x[1].txt"]),
        ([".hidden.txt"], [".hidden.txt"]),
    ],
)
def test_files_folders_and_globs(corpus, patterns, files):
    assert find(patterns) == files


@pytest.mark.parametrize(
    ("exclude", "files"),
    [
        (["**/sub/**", "*.md"], ["a.txt", "b.txt", "tests/e.txt", "x[1].txt"]),
        (["sub", "tests/", "notes.*"], ["a.txt", "b.txt", "x[1].txt"]),
        (["./sub/deep", "?.txt"], ["notes.md", "x[1].txt"]),
        (["{here}/**/*.txt"], ["notes.md"]),
        (["{here}/*.txt", "**/[!a-d].txt"], ["notes.md", "sub/c.txt", "sub/deep/d.txt"]),
        (
            ["s/deep", "ub/*.txt", "deep/**/[d].txt", "*.m", "x[1].txt"],
            ["a.txt", "b.txt", "notes.md", "sub/c.txt", "tests/e.txt", "x[1].txt"],
        ),
        (
            ["sub/*.txt", "x[[]1].txt"],
            ["a.txt", "b.txt", "notes.md", "sub/deep/d.txt", "tests/e.txt"],
        ),
    ],
)
def test_excluded_files_and_folders(corpus, exclude, files):
    assert find(["."], [glob.replace("{here}", str(corpus)) for glob in exclude]) == files


def test_order_does_not_depend_on_the_order_of_patterns(corpus):
    assert find(["sub", "a.txt"]) == find(["a.txt", "sub"])


def test_two_names_of_one_file_are_one_document(corpus):
    os.symlink("a.txt", "z.txt")
    assert find(["?.txt"]) == ["a.txt", "b.txt"]


def test_a_jsonl_folder_means_its_jsonl_files(corpus):
    (corpus / "sub" / "x.jsonl").write_text("{}")
    assert find(["sub"], file_format="jsonl") == ["sub/x.jsonl"]


@pytest.mark.parametrize(
    ("patterns", "files"),
    [
        (["sub/a"], ["sub/a.idx"]),
        (["sub/a.bin", "sub/a.idx", "sub/a"], ["sub/a.idx"]),
        (["sub/?"], ["sub/a.idx", "sub/b.idx"]),
        (["sub/*.bin"], ["sub/a.idx", "sub/b.idx"]),
        (["sub"], ["sub/a.idx", "sub/b.idx"]),
        (["tests"], ["tests.idx"]),
    ],
)
def test_an_indexed_dataset_is_named_by_its_prefix_or_either_file(corpus, patterns, files):
    """A folder stands for all in it, unless a dataset has that very prefix."""
    for name in ("sub/a", "sub/b", "tests"):
        for suffix in (".bin", ".idx"):
            (corpus / (name + suffix)).touch()
    assert find(patterns, file_format="indexed") == files


def test_a_prefix_without_files_is_named(corpus):
    with pytest.raises(DataError, match=r"data\.paths: no \.idx file matches 'sub/x'"):
        find(["sub/x"], file_format="indexed")


def test_home_is_expanded(corpus, monkeypatch):
    monkeypatch.setenv("HOME", str(corpus / "sub"))
    assert find(["~/c.txt"]) == ["sub/c.txt"]


def test_python_stdlib_is_the_standard_library_without_installed_packages():
    stdlib = sysconfig.get_path("stdlib")
    files = find_files(["{python_stdlib}/**/*.py"], ["{python_stdlib}/json"], "text", "data.paths")
    assert os.path.join(stdlib, "argparse.py") in files
    assert os.path.join(stdlib, "json", "decoder.py") not in files
    assert not any(
        path.startswith((f"{stdlib}/site-packages/", f"{stdlib}/dist-packages/")) for path in files
    )


@pytest.mark.parametrize("pattern", ["missing.txt", "sub/*.md", "{python_lib}/*.py", "nowhere/"])
def test_a_pattern_without_files_is_named(corpus, pattern):
    with pytest.raises(DataError, match=r"data\.paths: no file matches") as caught:
        find(["a.txt", pattern])
    assert repr(pattern) in str(caught.value)
    assert str(corpus) in str(caught.value)  # relative paths: seen from where


def test_a_pattern_whose_files_are_all_excluded_is_named(corpus):
    with pytest.raises(
        DataError, match=r"all 2 files that match 'sub' are left out by data\.exclude"
    ):
        find(["sub"], ["sub/**"])


def read(path, file_format="jsonl", text_key="text"):
    return list(read_documents([str(path)], file_format, text_key))


def test_a_text_file_is_one_document_of_its_bytes(tmp_path):
    (tmp_path / "x").write_bytes(b"line\r\n\xff\x00")
    assert read(tmp_path / "x", "text") == [(f"{tmp_path}/x", b"line\r\n\xff\x00")]


def test_a_jsonl_line_is_one_document(tmp_path):
    texts = ["one", "zwei\nZeilen", "", "世界"]
    lines = [json.dumps({"id": i, "body": t}, ensure_ascii=i % 2 == 0) for i, t in enumerate(texts)]
    path = tmp_path / "x.jsonl"
    path.write_text(
        lines[0] + "\r\n\n  \n" + "\n".join(lines[1:]), encoding="utf-8"
    )  # no newline at the end
    assert read(path, text_key="body") == [
        (f"{path}:{n}", t) for n, t in zip((1, 4, 5, 6), texts, strict=True)
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "not a line of JSON: Unterminated string"),
        (b'{"text": "\xff"}', "not a line of JSON: 'utf-8' codec"),
        (b'["text"]', "expected a JSON object, found list"),
        (
            b'{"id": 1, "content": "x"}',
            "no key 'text'; keys present: 'id', 'content'; set data.text_key",
        ),
        (b"{}", "no key 'text'; keys present: none"),
        (b'{"text": 7}', "'text' holds int, not a string"),
        (b'{"text": null}', "'text' holds NoneType, not a string"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:2: {message}")


@pytest.mark.parametrize(
    ("record", "text_key", "text"),
    [
        ({"a": {"b": "inner"}}, "a.b", "inner"),
        ({"a": {"b": {"c": "deep"}}, "b": "x"}, "a.b.c", "deep"),
        ({"a": {"b": "inner"}, "a.b": "a field of that name"}, "a.b", "a field of that name"),
    ],
)
def test_a_dotted_key_leads_into_objects(tmp_path, record, text_key, text):
    (tmp_path / "x").write_text(json.dumps(record))
    assert [text for _, text in read(tmp_path / "x", text_key=text_key)] == [text]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"b": {"c": "x"}}, "no key 'a'; keys present: 'b'; set data.text_key"),
        ({"a": {"x": 1, "y": 2}}, "no key 'b' in 'a'; keys present: 'x', 'y'; set data.text_key"),
        ({"a": {"b": {}}}, "no key 'c' in 'a.b'; keys present: none"),
        ({"a": "text"}, "expected a JSON object in 'a', found str"),
        ({"a": {"b": {"c": ["x"]}}}, "'a.b.c' holds list, not a string"),
    ],
)
def test_a_dotted_key_that_leads_nowhere_is_named(tmp_path, record, message):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(DataError) as caught:
        read(path, text_key="a.b.c")
    assert str(caught.value).startswith(f"{path}:1: {message}")


def test_an_unreadable_file_is_named(tmp_path):
    """A file that vanishes after it was found; and a folder in its place, which fails at reading."""
    for path in (tmp_path / "gone", tmp_path):
        with pytest.raises(DataError, match=rf"^{path}: cannot be read \(.*data\.exclude"):
            read(path)
