"""Every public name has an example, and so have some of their members; all run."""

import pytest

import nvmeio
from docstring_examples import examples, run_example


@pytest.mark.parametrize("name", examples())
def test_an_example_runs(name, tmp_path, monkeypatch):
    run_example(name, tmp_path, monkeypatch)


def test_examples_of_methods_and_class_methods_are_found():
    assert {"nvmeio.ArrayFile.create", "nvmeio.Handle.read"} < {*examples()}


def test_a_wrong_example_of_a_method_fails(tmp_path, monkeypatch):
    right = nvmeio.ArrayFile.windows.__doc__
    wrong = right.replace("array([[90,", "array([[91,")
    assert wrong != right
    monkeypatch.setattr(nvmeio.ArrayFile.windows, "__doc__", wrong)
    with pytest.raises(AssertionError, match=r"Got:\s+array\(\[\[90"):
        run_example("nvmeio.ArrayFile.windows", tmp_path, monkeypatch)
