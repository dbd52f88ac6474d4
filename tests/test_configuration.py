"""show_config(): the installation and the environment."""

import json
import platform
import subprocess
import sys

import pytest

import nvmeio

SECTIONS = ("versions", "build", "engines", "handle", "pool", "limits")
SECTIONS += ("copies", "environment")


def test_the_dicts_equal_what_other_calls_return(monkeypatch):
    monkeypatch.setenv("NVMEIO_QUEUE_DEPTH", "77")
    found = nvmeio.show_config(mode="dicts")
    assert tuple(found) == SECTIONS
    assert found["versions"]["nvmeio"] == nvmeio.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert found["engines"] == nvmeio.engines()
    assert found["build"].items() <= nvmeio.build_info().items()
    assert found["pool"] == nvmeio.pool_stats()
    assert found["environment"]["NVMEIO_QUEUE_DEPTH"] == "77"
    assert json.loads(json.dumps(found)) == found


def test_the_options_are_those_of_a_handle(monkeypatch):
    monkeypatch.setenv("NVMEIO_ENGINE", "threads")
    monkeypatch.setenv("NVMEIO_BLOCK_SIZE", "65536")
    options = nvmeio.show_config("dicts")["handle"]
    with nvmeio.Handle() as handle:
        assert options == {name: getattr(handle, name) for name in options}


def test_the_configuration_is_printed_with_a_line_for_each_fact(capsys):
    assert nvmeio.show_config() is None
    printed, errors = capsys.readouterr()
    assert errors == ""
    lines = printed.splitlines()
    assert [line.split(":")[0] for line in lines if line[0] != " "] == [*SECTIONS]
    assert f"  nvmeio: {nvmeio.__version__}" in lines
    assert "  block_size: 1 MiB" in lines


@pytest.mark.parametrize("variable", ["NVMEIO_WORKERS", "NVMEIO_POOL_BYTES", "NVMEIO_COPY"])
def test_an_invalid_value_is_shown_and_not_raised(variable):
    code = "import nvmeio; nvmeio.show_config()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), variable: "many"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"error: {variable} is 'many'; " in done.stdout
    assert f"  {variable}: many\n" in done.stdout


def test_another_mode_is_refused():
    with pytest.raises(ValueError, match="mode is 'yaml'; it must be one of stdout, dicts"):
        nvmeio.show_config("yaml")
