"""DeepSpeed's "aio" block: reading, warnings and writing."""

import errno
import json
import os
import stat
import sys
import warnings

import numpy as np
import pytest

import nvmeio
from nvmeio._publish import files
from nvmeio.deepspeed import aio_config, aio_handle, write_aio_config

# DeepSpeed's values for an empty block.
DEFAULTS = {
    "block_size": 1048576,
    "queue_depth": 8,
    "single_submit": False,
    "overlap_events": True,
    "intra_op_parallelism": 1,
}
# No value is a default.
BLOCK = {
    "block_size": 262144,
    "queue_depth": 32,
    "single_submit": True,
    "overlap_events": False,
    "intra_op_parallelism": 2,
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ds_config.json"


def quietly(source):
    """Read a block, which must cause no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return aio_config(source)


class TestReading:
    @pytest.mark.parametrize(
        "whole", [BLOCK, {"aio": BLOCK}, {"train_batch_size": 8, "aio": BLOCK}]
    )
    def test_a_block_is_read_from_dicts_and_files(self, path, whole):
        path.write_text(json.dumps(whole))
        assert quietly(whole) == quietly(path) == quietly(str(path)) == BLOCK

    @pytest.mark.parametrize(
        "whole", [{}, {"aio": {}}, {"aio": None}, {"train_batch_size": 8, "aio": {}}]
    )
    def test_missing_keys_have_deepspeeds_defaults(self, whole):
        found = quietly(whole)
        assert found == DEFAULTS
        assert [type(value) for value in found.values()] == [int, int, bool, bool, int]

    def test_a_missing_block_causes_a_warning(self):
        with pytest.warns(UserWarning, match="it is missing, so DeepSpeed's"):
            assert aio_config({"train_batch_size": 8, "queue_dept": 3}) == DEFAULTS

    def test_numbers_are_read_in_every_form_that_deepspeed_accepts(self, path):
        path.write_text('{"aio": {"block_size": 1e6, "queue_depth": 8.0}}')
        found = quietly(path)
        assert (found["block_size"], found["queue_depth"]) == (1_000_000, 8)
        assert {type(value) for value in found.values()} == {int, bool}

    def test_a_handle_is_made_of_it(self):
        with aio_handle(**quietly(BLOCK)) as handle:
            found = {name: getattr(handle, f"get_{name}")() for name in BLOCK}
        assert found == BLOCK
        nvmeio.aio_handle(**quietly(BLOCK)).close()

    @pytest.mark.parametrize("alias", ["thread_count", "num_threads"])
    def test_aliases_of_the_parallelism_work_with_a_warning(self, alias):
        with pytest.warns(UserWarning, match=f"{alias} stands for intra_op_parallelism"):
            assert aio_config({alias: 4})["intra_op_parallelism"] == 4

    def test_one_argument_cannot_have_two_values(self):
        with pytest.raises(ValueError, match=r"num_threads is 4 and intra_op_par\w+ 2"):
            aio_config({"num_threads": 4, "intra_op_parallelism": 2})
        with pytest.warns(UserWarning, match="num_threads"):
            assert aio_config({"num_threads": 4, "intra_op_parallelism": 4})

    @pytest.mark.parametrize(
        ("text", "value"), [("true", True), ("True", True), ("false", False)]
    )
    @pytest.mark.parametrize("name", ["single_submit", "overlap_events"])
    def test_booleans_in_quotes_work_with_a_warning(self, name, text, value):
        with pytest.warns(UserWarning, match=f"{name} is '{text}', in quotes"):
            assert aio_config({"aio": {name: text}})[name] is value

    def test_the_output_of_deepspeeds_tuner_is_read(self, path):
        printed = {"single_submit": "false", "overlap_events": "true", "num_threads": 8}
        printed |= {"queue_depth": 64, "block_size": 8388608}
        path.write_text(json.dumps({"aio": printed}))
        with pytest.warns(UserWarning, match="the .aio. block") as caught:
            found = aio_config(path)
        assert found == {
            "block_size": 8388608,
            "queue_depth": 64,
            "single_submit": False,
            "overlap_events": True,
            "intra_op_parallelism": 8,
        }
        assert len(caught) == 3
        assert {warning.filename for warning in caught} == {__file__}

    def test_unknown_keys_are_named(self):
        with pytest.warns(UserWarning, match="these keys are unknown: queue_dept, x"):
            assert aio_config({"aio": {"x": 1, "queue_dept": 3}}) == DEFAULTS

    @pytest.mark.parametrize("value", [True, "true"])
    def test_use_gds_causes_a_warning(self, value):
        with pytest.warns(UserWarning, match="the .aio. block") as caught:
            assert aio_config({"use_gds": value}) == DEFAULTS
        assert "use_gds is true, but nvmeio copies" in str(caught[-1].message)
        assert quietly({"use_gds": False}) == DEFAULTS

    @pytest.mark.parametrize(
        ("block", "error", "words"),
        [
            ({"block_size": "1M"}, TypeError, "block_size is '1M'; it must be an integer"),
            ({"block_size": 1e6 + 0.5}, TypeError, "block_size is 1000000.5"),
            ({"queue_depth": 0}, ValueError, "queue_depth is 0; it must be from 1 to"),
            ({"queue_depth": True}, TypeError, "queue_depth is True"),
            ({"num_threads": 1000}, ValueError, "intra_op_parallelism is 1000"),
            ({"single_submit": "no"}, TypeError, "single_submit is 'no'"),
            ({"overlap_events": 2}, ValueError, "overlap_events is 2"),
            ({"use_gds": "maybe"}, TypeError, "use_gds is 'maybe'"),
            ({"aio": [1]}, TypeError, r'"aio" is \[1\]; it must be a JSON object'),
        ],
    )
    @pytest.mark.filterwarnings("ignore:the .aio. block")
    def test_invalid_values_are_refused(self, block, error, words):
        with pytest.raises(error, match=words):
            aio_config(block)

    def test_a_file_with_comments_needs_hjson(self, path, monkeypatch):
        path.write_text('{"aio": {\n  # deep\n  "queue_depth": 5\n}}')
        monkeypatch.setitem(sys.modules, "hjson", None)
        with pytest.raises(ValueError, match=r"cannot be used: .*line 2.*install hjson"):
            aio_config(path)
        monkeypatch.undo()
        assert quietly(path) == DEFAULTS | {"queue_depth": 5}

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ('{"aio": {"queue_depth": 1, "queue_depth": 2}}', "'queue_depth' comes twice"),
            ("[1, 2]", "is not a JSON object"),
            (" \n", "json cannot be used: it is empty"),
            (b'{"aio": {}, "name": "m\xfcller"}', "json cannot be used: 'utf-8' codec"),
        ],
    )
    def test_an_invalid_file_is_refused(self, path, text, words):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ValueError, match=words):
            aio_config(path)

    def test_a_byte_order_mark_is_ignored(self, path):
        path.write_text(json.dumps({"aio": BLOCK}), encoding="utf-8-sig")
        assert quietly(path) == BLOCK

    def test_a_missing_file_is_named(self, path):
        with pytest.raises(FileNotFoundError) as caught:
            aio_config(path)
        assert caught.value.filename == str(path)


class TestWriting:
    def test_a_written_block_is_read_back(self, path):
        assert write_aio_config(path, BLOCK) == BLOCK
        assert json.loads(path.read_text()) == {"aio": BLOCK}
        assert quietly(path) == BLOCK

    def test_the_block_of_a_handle_is_written(self, path):
        with nvmeio.aio_handle(**BLOCK) as handle:
            assert write_aio_config(path, handle) == BLOCK
        assert quietly(path) == BLOCK

    def test_booleans_and_names_are_written_as_deepspeed_reads_them(self, path):
        printed = {"aio": {"single_submit": "true", "num_threads": 4}}
        assert write_aio_config(path, printed) == DEFAULTS | {
            "single_submit": True,
            "intra_op_parallelism": 4,
        }
        assert '"single_submit": true' in path.read_text()
        assert quietly(path)["intra_op_parallelism"] == 4

    def test_everything_else_in_the_file_stays(self, path):
        before = {"name": "Müller", "aio": {"use_gds": "true", "x": 1}}
        before["aio"] |= {"num_threads": 9, "queue_depth": 9}
        path.write_text(json.dumps(before, ensure_ascii=False))
        path.chmod(0o640)
        write_aio_config(path, BLOCK)
        assert json.loads(path.read_text()) == {
            "name": "Müller",
            "aio": {"use_gds": True, "x": 1, **BLOCK},
        }
        assert "Müller" in path.read_text()
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert os.listdir(path.parent) == [path.name]

    def test_options_that_are_not_given_stay(self, path):
        path.write_text(json.dumps({"aio": {**BLOCK, "use_gds": True}}))
        block = write_aio_config(path, {"queue_depth": 64, "use_gds": False})
        assert block == {**BLOCK, "queue_depth": 64, "use_gds": False}
        assert json.loads(path.read_text()) == {"aio": block}

    def test_options_that_are_not_given_stay_under_their_proper_names(self, path):
        path.write_text('{"aio": {"num_threads": 8, "overlap_events": "false"}}')
        block = write_aio_config(path, {"queue_depth": 64})
        assert block["intra_op_parallelism"] == 8
        assert block["overlap_events"] is False
        assert "num_threads" not in path.read_text()

    def test_a_block_alone_is_written_in_place(self, path):
        path.write_text('{"queue_depth": 32, "num_threads": 2}')
        write_aio_config(path, {"block_size": 4096})
        assert json.loads(path.read_text()) == {
            **DEFAULTS,
            "queue_depth": 32,
            "block_size": 4096,
            "intra_op_parallelism": 2,
        }

    @pytest.mark.parametrize("value", [1, np.True_, "True", True])
    def test_every_boolean_is_a_real_one(self, path, value):
        write_aio_config(path, {"use_gds": value, "single_submit": value})
        found = json.loads(path.read_text())["aio"]
        assert found["use_gds"] is True
        assert found["single_submit"] is True

    def test_a_letter_that_utf_8_cannot_encode_stays(self, path):
        path.write_text('{"name": "\\ud800"}')
        write_aio_config(path, BLOCK)
        assert json.loads(path.read_text()) == {"name": "\ud800", "aio": BLOCK}

    def test_the_file_never_becomes_more_readable(self, path, monkeypatch):
        modes = []

        def note(descriptor, target):
            modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
            become_like(descriptor, target)

        def refuse(folder):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), folder)

        become_like = files.become_like
        monkeypatch.setattr(files, "become_like", note)
        # Without a name, nobody could open it.
        monkeypatch.setattr(files, "open_unnamed", refuse)
        path.write_text("{}")
        path.chmod(0o600)
        write_aio_config(path, BLOCK)
        assert modes == [0o600]

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
    def test_the_owner_of_the_file_stays(self, path):
        path.write_text("{}")
        os.chown(path, 12345, 54321)
        write_aio_config(path, BLOCK)
        assert (path.stat().st_uid, path.stat().st_gid) == (12345, 54321)

    def test_a_read_only_file_is_not_changed(self, path, monkeypatch):
        path.write_text("{}")

        def refuse(name, flags):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)

        monkeypatch.setattr(os, "access", lambda name, mode, **_: mode != os.W_OK)
        monkeypatch.setattr(files, "opened", refuse)
        with pytest.raises(OSError, match="Read-only.*" + path.name):
            write_aio_config(path, BLOCK)
        assert path.read_text() == "{}"
        assert os.listdir(path.parent) == [path.name]

    @pytest.mark.parametrize("config", [None, "x.json", 3])
    def test_only_a_dict_or_a_handle_can_be_written(self, path, config):
        with pytest.raises(TypeError, match="it must be a dict or an aio_handle"):
            write_aio_config(path, config)
        assert not path.exists()

    def test_a_link_stays_a_link(self, path, tmp_path):
        path.write_text("{}")
        link = tmp_path / "link.json"
        link.symlink_to(path)
        write_aio_config(link, BLOCK)
        assert link.is_symlink()
        assert quietly(path) == BLOCK

    @pytest.mark.parametrize(
        ("config", "error", "words"),
        [
            ({"queue_depth": 0}, ValueError, "queue_depth is 0"),
            ({"queue_dept": 1}, ValueError, "unknown keys: queue_dept; known are block_si"),
            ({"aio": {"x": 1}}, ValueError, "unknown keys: x"),
        ],
    )
    def test_invalid_options_change_nothing(self, path, config, error, words):
        path.write_text('{"aio": {}}')
        with pytest.raises(error, match=words):
            write_aio_config(path, config)
        assert path.read_text() == '{"aio": {}}'
        assert os.listdir(path.parent) == [path.name]

    @pytest.mark.parametrize(
        "text",
        [
            '{"aio": {} # mine\n}',
            "",
            "[]",
            '{"a": 1, "a": 2}',
            '{"train_batch_size": 8, "queue_depth": 4}',
        ],
    )
    def test_a_file_that_would_lose_content_is_not_changed(self, path, text):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"ds_config.json"):
            write_aio_config(path, BLOCK)
        assert path.read_text() == text
